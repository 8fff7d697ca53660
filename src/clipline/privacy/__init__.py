"""What a run costs in privacy, in NumPy and float64 alone.

relations    which two populations count as neighbours
events       what one round did: its sampling and its noise
split        Theorem 1: one noise multiplier for the round, divided between the updates and the bit
quadrature   logarithms of integrals whose mass may lie anywhere
renyi        the Renyi curve of one round, from the table (sampling, relation)
conversion   from a Renyi curve to epsilon at delta
ledger       the rounds of a run, in memory and as JSON lines
accountant   ledger -> guarantee
calibration  guarantee -> noise multiplier or number of rounds

Each module imports only from those above it. Public names stand in `clipline/__init__`.
"""

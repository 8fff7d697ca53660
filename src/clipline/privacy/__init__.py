"""What a run costs in privacy, in NumPy and SciPy, in float64 alone.

relations     which two populations count as neighbours
split         Theorem 1: one noise multiplier for the round, divided between the updates and the bit
events        what one round did: its sampling and its noise
quadrature    logarithms of integrals whose mass may lie anywhere
renyi         Renyi curves in closed form
theorem27     the looser Renyi curve that the paper used
halves        privacy losses in closed form
loss          the privacy loss of one round on a lattice
single        one round alone, exactly
pairs         THE TABLE: (sampling, relation) -> dominating pair
curves        the Renyi curve of any event
conversion    from a Renyi curve to epsilon at delta, and back
windows       which part of a total loss to compute, and how finely
totals        the total loss of many rounds, read at an epsilon or a delta
composition   from privacy losses to epsilon at delta, and back
gaussian      rounds without sampling, exactly
ledger        the rounds of a run, in memory and as JSON lines
guarantee     what is promised, ready to quote
accountant    ledger -> guarantee
searches      the edge of what is private along one number
calibration   guarantee -> noise multiplier, number of rounds or cohort
selection     the price of choosing the best of several runs

Each module imports only from those above it. Public names stand in `clipline/__init__`.
"""

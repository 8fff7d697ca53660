"""Models and losses that an engine must keep each user apart in, or refuse."""

from adversarial.zoo import buffers, coupling, parameters, randomness, rows, state, structure

FAMILIES = (state, parameters, buffers, coupling, randomness, structure)
DENSE = [entry for family in FAMILIES for entry in family.zoo.values()]
ROWS = list(rows.zoo.values())
ZOO = {entry.name: entry for entry in (*DENSE, *ROWS)}

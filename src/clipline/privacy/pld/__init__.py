"""Accounting with privacy-loss distributions (PLD): the law of the privacy loss of one round, composed over many.

Begin with `one_round` (the loss in closed form), then `discretised` (the same on a lattice) and `compose` (epsilon and
delta of many rounds). `compose` uses `total` and, where large losses are rare, `rare_losses`.
"""

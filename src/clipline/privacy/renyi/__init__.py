"""Renyi accounting: the Renyi divergence of one round as a function of its order, and epsilon from it.

Begin with `curves` (closed forms); `conversion` turns a curve into epsilon at delta; `wang2019` is the looser curve
that the paper used, kept to reproduce its tables. Which round has which curve is said in `dominating_pairs`.
"""

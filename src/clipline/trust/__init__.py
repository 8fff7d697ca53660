"""What somebody who has to sign an epsilon needs: a check of a run, its seal, a statement, a self-test and an audit.

Begin with `verify.py`, which reads a run directory and computes its guarantee again.
"""

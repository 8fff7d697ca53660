"""The paper's six tasks, one file each: model, loss, metrics and what a population must hold.

Begin with `emnist_cr`, a short one.
"""

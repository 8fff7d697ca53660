"""Who runs the trainer: this process, forked workers on this machine, or the processes that torchrun started.

Begin with `single.py` (train, clip, add up), then `group.py` (several ranks).
"""

"""Whether a training can work within a promise: the noise on its mean update against the clip, and what would help.

Begin with `noise_norm` (the ratio and the words for it), then `remedies` (more users, fewer parameters, and so on, each
computed) and `noise_table` (the noise of many cohorts and rounds).
"""

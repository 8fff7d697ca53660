"""Private statistics of users' data, for preprocessing: released with noise, charged, and named by every guarantee.

Begin with `private_statistics`, which holds what was released. `noisy_sum` is the way through the mechanism that all
take; `scales` and `vocabulary` say what each user adds, and what is read from the noisy sum.
"""

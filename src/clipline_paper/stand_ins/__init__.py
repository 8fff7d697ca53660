"""Stand-ins: generated users in the formats of the paper's data sets, for where the data are not there.

One file for each data set; begin with `emnist`. A user's examples depend on the user's number alone (not in `cifar100`,
where labels are given out without replacement).
"""

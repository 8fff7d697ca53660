"""Stand-ins: generated users in the formats of the paper's data sets, for where the data are not there.

One file for each data set. A user's examples depend on the user's number alone (but on `cifar100`).
"""

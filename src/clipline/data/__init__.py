"""Users' data in files: readers, the writer that groups rows by user out of core, stores and their manifests.

Begin with `population_io`, which `Population.open` and `from_table` call, or with `prepare`, which the command line
calls; both read by `readers/` and write by `store`. `catalogue` knows the paper's data sets.
"""

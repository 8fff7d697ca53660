"""Compiled programs: made from a traced graph, kept in this process, stored for the next one.

`inductor.py` compiles, `repeats.py` finds what need be compiled once only (in a graph that `tidied.py` has tidied),
`program_cache.py` keeps, `program_files.py` stores, `notices.py` says that somebody waits.
"""

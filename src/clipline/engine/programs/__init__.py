"""Compiled programs: made from a traced graph, kept in this process, stored for the next one.

`inductor.py` compiles, `program_cache.py` keeps, `program_files.py` stores, `notices.py` says that somebody waits.
"""

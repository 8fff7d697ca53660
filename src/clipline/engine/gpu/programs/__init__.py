"""Compiled programs: made from a traced graph, kept in this process, stored for the next one.

Begin with `program_cache.py`, which keeps programs and finds them again. `inductor.py` compiles, `repeats.py` finds
what need be compiled once only, `program_files.py` stores; `core/notices.py` tells callbacks that training waits for
the compiler.
"""

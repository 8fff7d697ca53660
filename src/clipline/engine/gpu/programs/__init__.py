"""Compiled programs: made from a traced graph and kept in this process.

Begin with `program_cache.py`, which keeps programs and finds them again. `inductor.py` compiles, `repeats.py` finds
what need be compiled once only; `core/notices.py` tells callbacks that training waits for the compiler.
"""

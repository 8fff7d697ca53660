"""What saves memory traffic when users train on CPU cores.

Begin with `allocator.py`, the one part that bought 5% or more; it is used if asked for.
"""

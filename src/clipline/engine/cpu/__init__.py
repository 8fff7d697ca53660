"""What saves memory traffic when users train on CPU cores. Begin with `allocator.py`, which is used if asked for."""

"""The paper's recipe for practice (its last section), in three steps that resume.

Begin with `recipe`, which takes the steps. `rates`, `noise` and `scale` are the rules of each step, on plain numbers.
"""

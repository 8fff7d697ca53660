"""The paper's recipe for practice (its last section), in three steps that resume.

Begin with `recipe`, which takes the steps; `question` is what is asked, `answer` what is written.
"""

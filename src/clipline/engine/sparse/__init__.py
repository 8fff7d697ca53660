"""Parameters of which a user touches few rows, such as the weights of a bag of words: only those rows are trained.

Begin with `row_fields.py`; `row_steps.py` trains one user.
"""

"""What every way of training shares, and the plainest of them: one user after the other.

Begin with `problem.py` (the model, the loss, the users' examples), then `one_by_one.py`. `working_model.py` copies the
caller's model, `batches.py` says who sees which example when, `updates.py` holds what came of it. Of a matrix of which
a user touches few rows only those are trained (`row_fields.py`).
"""

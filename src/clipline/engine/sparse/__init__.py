"""Parameters of which a user touches few rows, such as the weights of a bag of words: only those rows are trained.

Begin with `row_fields.py`; `row_steps.py` trains one user. On CPU cores `recorded_weight.py` avoids even the small
matrix of a user's own rows: it records the factors of each gradient (`outer_products.py`), and `updates.py` measures
and sums them.
"""

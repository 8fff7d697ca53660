"""Operations of a stack on processor cores that round each user's numbers alike, whoever else is in the stack.

Begin with `known.py`: which operations do, and how a model is looked at. `replacements.py` says what runs in the place
of those that do not, and `activations.py`, `products.py` and `convolution.py` have it.
"""

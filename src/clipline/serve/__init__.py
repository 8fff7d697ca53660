"""From a stored model to predictions: `load` reads what `TrainResult.save` or a run directory has written.

Begin with `load`, which finds the model's code too; `new_data` brings tables and arrays into the form of a batch.
"""

"""Train models with user-level differential privacy and no clip norm to tune."""

__version__ = "0.1.0"

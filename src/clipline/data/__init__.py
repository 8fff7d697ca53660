"""Readers of the files that the field uses, and the writer that groups them by user without holding them."""

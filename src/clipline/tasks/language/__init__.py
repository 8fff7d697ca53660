"""What fine-tuning a language model of Hugging Face needs beside the training itself: its loss and its perplexity.

Begin with `causal_lm`, which has both. docs/adapters.md shows a whole training.
"""

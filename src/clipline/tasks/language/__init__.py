"""What fine-tuning a language model of Hugging Face needs beside the training itself: its loss and its perplexity."""

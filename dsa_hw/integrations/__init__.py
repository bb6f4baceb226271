"""Allocation inside the training loops of other libraries: Lightning and Hugging Face transformers."""

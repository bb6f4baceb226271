"""Training of weights: fine-tuning, batch-norm statistics, loaders, losses, metrics."""

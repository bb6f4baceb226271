"""DSA: differentiable sparsity allocation (Ning et al., ECCV 2020)."""

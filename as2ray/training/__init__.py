"""Training: one plain PyTorch loop over packed batches. Must not know corpora or Ray."""

"""One plain PyTorch training loop over packed batches. No corpora, no Ray."""

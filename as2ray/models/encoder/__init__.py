"""Hugging Face encoders over packed batches. Must not import rankers, files or Ray."""

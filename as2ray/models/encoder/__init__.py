"""Hugging Face encoders over packed batches. No rankers, files or Ray."""

"""Models: encoders as runs of layers, and the rankers on them. Must not know files or Ray."""

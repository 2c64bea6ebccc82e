"""Corpora: a raw release in, a candidates table out. Must not know tokens, models or Ray."""

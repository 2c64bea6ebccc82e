"""Corpora, one data set per file: a raw release in, a candidates table out. No tokens, no Ray."""

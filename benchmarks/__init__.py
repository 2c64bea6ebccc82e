"""Benchmarks: one script a claim; each compares two sides in one run and prints their ratio."""

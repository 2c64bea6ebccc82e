"""Benchmarks: each script measures one claim, mostly as the ratio of two systems in one run."""

"""Pipelines: experiments and applications, one module each, with recipes in `recipes`.

Run `python -m pipelines.NAME --config RECIPE --output DIR`, also as a Ray job.
"""

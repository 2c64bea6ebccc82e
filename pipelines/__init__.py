"""Pipelines: drivers that put the rooms together, one file each, with recipes beside them.

Run by `python -m pipelines.NAME --config RECIPE --output DIR`, here or as a Ray job.
"""

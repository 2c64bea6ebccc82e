"""Stages of an experiment and the folders that hold them."""

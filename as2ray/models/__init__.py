"""Rankers. Reads no files (`checkpoints` does) and does not import Ray."""

"""Evaluation: scores and judgements in, measures out. Must not know models or Ray."""

"""Retrieval: keyword scores over text. Must not know models or Ray."""

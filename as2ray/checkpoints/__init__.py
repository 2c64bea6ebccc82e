"""Rankers loaded, saved and initialized; foreign checkpoint formats. Must not import training or Ray."""

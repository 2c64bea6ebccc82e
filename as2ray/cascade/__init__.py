"""Meaning and cost of dropping candidates between exits. Numbers only: no models."""

"""Training, scoring and indexing on Ray. No ranking or training logic."""

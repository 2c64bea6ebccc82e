"""Distributed: the rooms that run the core on Ray. Must hold no ranking or training logic."""

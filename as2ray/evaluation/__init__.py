"""Measures, significance and reports, from scores and labels. No models, no Ray."""

"""Speed ratios, latency and measured savings of models. No Ray."""

"""Speed ratios, latency and measured savings of models. Must not import training or Ray."""

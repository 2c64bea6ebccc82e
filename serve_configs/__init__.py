"""Configurations of the service: a laptop, a GPU cluster, Kubernetes, a dashboard."""

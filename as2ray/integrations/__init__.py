"""Rankers in other frameworks, one per file (extra `integrations`). No Ray, no service."""

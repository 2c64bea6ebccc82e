"""Search spaces, one per file; no knowledge of how a trial runs."""

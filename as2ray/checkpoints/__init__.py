"""Loading, saving and initializing rankers; foreign checkpoint formats. No Ray."""

"""Text: sentence splitting, tokenising, packing. Must not know models, files of corpora or Ray."""

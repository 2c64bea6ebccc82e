"""Objectives: one short loss a file, over logits. Must not know models' insides or Ray."""

"""Sentence splitting, tokenization, packing, passage windows, BM25 and word overlap of texts.

Must not import torch or transformers: the tasks that tokenize on a cluster start faster without.
"""

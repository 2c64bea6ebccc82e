"""Ranks sentences by how well they answer a question: `python examples/rank.py [MODEL]`."""

import sys

import as2ray

MODEL = sys.argv[1] if sys.argv[1:] else "cross-encoder/ms-marco-MiniLM-L6-v2"
QUESTION = "How do I stop a loop early?"
SENTENCES = [
    "Lists are mutable.",
    "The break statement ends the nearest loop.",
    "See also the chapter on loops.",
]

ranker = as2ray.load(MODEL)
for answer in ranker.rank(QUESTION, SENTENCES):
    print(f"{answer.score:.3f}  {answer.text}")

"""A peer of `benchmarks.ranking`: sentence-transformers' CrossEncoder, in a process of its own.

Knows sentence-transformers alone, so that it runs in an environment without as2ray. It loads a
model and a text, then passes over the text whenever a line comes in, and answers with seconds.
"""

import json
import os
import sys
import time
from typing import Any

BATCH_SIZE = 32
"""CrossEncoder's default."""


def main() -> None:
    """Reads one JSON object that says what to do, then a line for each pass."""
    told = json.loads(sys.stdin.readline())
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, told["cores"])
    import torch
    from sentence_transformers import CrossEncoder

    torch.set_num_threads(len(told["cores"]))
    keywords: dict[str, Any] = dict(told["model_kwargs"])
    if "dtype" in keywords:
        keywords["dtype"] = getattr(torch, keywords["dtype"])
    model = CrossEncoder(
        told["model"],
        max_length=told["max_length"],
        backend=told["backend"],
        model_kwargs=keywords,
        device="cpu",
    )
    questions = told["questions"]
    batches = [batch for question in questions for batch in _tokenize_batches(model, *question)]
    write_message({"ready": True})
    for line in sys.stdin:
        began = time.perf_counter()
        if line.strip() == "text":
            for question, candidates in questions:
                model.rank(question, candidates, batch_size=BATCH_SIZE, show_progress_bar=False)
        else:
            with torch.inference_mode():
                for batch in batches:
                    model(dict(batch))
        write_message({"seconds": time.perf_counter() - began})


def _tokenize_batches(model: Any, question: str, candidates: list[str]) -> list[Any]:
    """What `rank` would give the network, tokenised: sorted by length, padded by batch."""
    pairs = sorted(((question, text) for text in candidates), key=lambda pair: -len(pair[1]))
    return [model.preprocess(pairs[i : i + BATCH_SIZE]) for i in range(0, len(pairs), BATCH_SIZE)]


def write_message(message: dict[str, Any]) -> None:
    """One line of JSON, marked, for libraries print too."""
    print("as2ray-peer " + json.dumps(message), flush=True)


if __name__ == "__main__":
    main()

"""A baseline of `benchmarks.ranking`: sentence-transformers' CrossEncoder in its own process.

It does not import as2ray, so that it runs in an environment without it. It loads a model and texts,
ranks the texts once for every line on its standard input, and prints the seconds.
"""

import json
import os
import sys
import time
from typing import Any

BATCH_SIZE = 32
"""CrossEncoder's default."""


def main() -> None:
    """Reads the configuration as one JSON object, then one line for each pass."""
    config = json.loads(sys.stdin.readline())
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, config["cores"])
    import torch
    from sentence_transformers import CrossEncoder

    torch.set_num_threads(len(config["cores"]))
    keywords: dict[str, Any] = dict(config["model_kwargs"])
    if "dtype" in keywords:
        keywords["dtype"] = getattr(torch, keywords["dtype"])
    model = CrossEncoder(
        config["model"],
        max_length=config["max_length"],
        backend=config["backend"],
        model_kwargs=keywords,
        device="cpu",
    )
    questions = config["questions"]
    batches = [batch for question in questions for batch in _tokenize_batches(model, *question)]
    write_message({"ready": True})
    for line in sys.stdin:
        started_at = time.perf_counter()
        if line.strip() == "text":
            for question, candidates in questions:
                model.rank(question, candidates, batch_size=BATCH_SIZE, show_progress_bar=False)
        else:
            with torch.inference_mode():
                for batch in batches:
                    model(dict(batch))
        write_message({"seconds": time.perf_counter() - started_at})


def _tokenize_batches(model: Any, question: str, candidates: list[str]) -> list[Any]:
    """Returns the inputs that `rank` would give the network: sorted by length, padded by batch."""
    pairs = sorted(((question, text) for text in candidates), key=lambda pair: -len(pair[1]))
    return [model.preprocess(pairs[i : i + BATCH_SIZE]) for i in range(0, len(pairs), BATCH_SIZE)]


def write_message(message: dict[str, Any]) -> None:
    """Prints one line of JSON with a prefix, since libraries print to standard output, too."""
    print("as2ray-peer " + json.dumps(message), flush=True)


if __name__ == "__main__":
    main()

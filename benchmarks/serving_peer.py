"""A baseline of `benchmarks.serving`: FastAPI around sentence-transformers' CrossEncoder.

It is the simplest service: every request is one call of the model.
"""

import argparse
import os

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import CrossEncoder


class Request(BaseModel):
    """The body of a request, as Infinity accepts it."""

    query: str
    documents: list[str]


def main() -> None:
    """Serves until the process is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cores", type=int, required=True)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    torch.set_num_threads(args.cores)
    model = CrossEncoder(args.model, max_length=128, device="cpu")
    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/rerank")
    def rerank(request: Request) -> list[dict[str, float]]:
        ranked = model.rank(request.query, request.documents, show_progress_bar=False)
        return [{"index": hit["corpus_id"], "score": float(hit["score"])} for hit in ranked]

    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="error")


if __name__ == "__main__":
    main()

"""Compares families of encoders, with random weights of their real shapes, with other libraries."""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from as2ray.checkpoints.loading import load
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.models.encoder.encoder import set_depth
from as2ray.models.packed_ranker import PackedRanker, as_packed_ranker
from as2ray.profiling.speed_ratio import measure_alternately
from as2ray.tables.schema import question_indices
from as2ray.text.packing import TokenSequences
from benchmarks.peer_processes import (
    INT8_PEERS,
    PEER_BACKENDS,
    BatchSizeSearch,
    compare_rates,
    keep_fastest,
    start_peers,
)
from benchmarks.report import Claim
from benchmarks.wikiqa_candidates import load_wikiqa_table, sample_candidates

FAMILY_SEARCH = BatchSizeSearch((8, 32), 1, 32)
FAMILY_CANDIDATES = 64
"""Candidates of each question, in a comparison of families."""
FAMILY_REPEATS = 3

FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "xlm-roberta": {"vocab_size": 250_002, "max_position_embeddings": 514, "type_vocab_size": 1},
    "distilbert": {},
    "modernbert": {"local_attention": 128},
    "gte": {},
    "nomic_bert": {},
    "deberta-v2": {
        "vocab_size": 128_100,
        "num_hidden_layers": 6,
        "relative_attention": True,
        "position_buckets": 256,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3_072,
    },
    "qwen3": {
        "hidden_size": 1_024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3_072,
        "tie_word_embeddings": True,
    },
}
"""Settings of the real shapes that are not transformers' defaults; DeBERTa's is v3 small, Qwen3's
Qwen3-Reranker-0.6B."""

SMALL_SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 30_522,
}

MIN_FAMILY_RATIO = 2.5
"""Claimed ratio to the fastest peer of a family, at WikiQA's lengths."""


def compare_families(args: argparse.Namespace) -> tuple[list[Claim], dict[str, Any]]:
    """Compares a random ranker of each family with sentence-transformers."""
    num_questions, num_candidates = (1, 8) if args.small else (args.questions or 1, args.candidates)
    num_repeats = 1 if args.small else args.repeats
    backends = [name for name in PEER_BACKENDS if name not in INT8_PEERS]
    table = load_wikiqa_table(args.data, args.small)
    rows = sample_candidates(table, num_questions, num_candidates)
    claims: list[Claim] = []
    results: dict[str, Any] = {}
    for family in args.family:
        with TemporaryDirectory(prefix="as2ray-ranking-") as folder:
            model = write_random_ranker(family, Path(folder) / "model", args.small, args.layers)
            ranker = as_packed_ranker(load(model, device="cpu", dtype="bf16"))
            if ranker.tokenizer.prompt:
                claims.append(_compare_shared_prefixes(family, ranker, rows, num_repeats, results))
                continue
            peers = keep_fastest(start_peers(model, rows, args, backends, FAMILY_SEARCH))
            compared = compare_rates({"packed": ranker}, peers, rows, num_repeats)
        for kind, ratios in compared.items():
            best = min(ratios["packed"], key=lambda peer: ratios["packed"][peer].median)
            ratio = ratios["packed"][best]
            rate = float(np.median(ratio.rates))
            claims.append(
                Claim(
                    f"{family}, from {kind} ({rate:,.0f} pairs/s): >= {MIN_FAMILY_RATIO:g} x best "
                    f"({best})",
                    str(ratio),
                    ratio.median >= MIN_FAMILY_RATIO,
                )
            )
            results[f"{family}, from {kind}"] = {
                peer: ratio.as_json() for peer, ratio in ratios["packed"].items()
            }
    return claims, results


def _compare_shared_prefixes(
    family: str, ranker: PackedRanker, rows: pa.Table, num_repeats: int, results: dict[str, Any]
) -> Claim:
    """Compares a decoder with itself, where each pair repeats the prefix of its question."""
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    question, shared = question_indices(rows), ranker.tokenizer.encode(*texts)
    prefixes = shared.prefixes
    assert prefixes is not None

    def build_workload(sequences: TokenSequences) -> Callable[[], float]:
        def workload() -> float:
            started_at = time.process_time()  # of all threads
            ranker.predict_sequences(sequences, question)
            return rows.num_rows / (time.process_time() - started_at)

        return workload

    workloads = [build_workload(part) for part in (shared, replace(shared, prefixes=None))]
    [ratio] = measure_alternately(workloads[0], workloads[1:], num_repeats)
    tokens = int(prefixes.lengths[prefixes.index].sum()) / int(shared.lengths.sum())
    results[f"{family}, prefixes once per question"] = {
        **ratio.as_json(),
        "share of prefix tokens": tokens,
    }
    rate = float(np.median(ratio.rates))
    name = (
        f"{family} ({rate:,.1f} pairs per CPU second): prefixes ({tokens:.0%} of the tokens) once"
    )
    return Claim(f"{name}: > 1 x whole prompts", str(ratio), ratio.median > 1)


def write_random_ranker(
    family: str, folder: Path, small: bool, num_layers: int | None = None
) -> Path:
    """Writes a classifier with random weights of the real shape, and MiniLM's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(packaged_minilm())
    shape = {**FAMILY_SHAPES[family], **(SMALL_SHAPE if small else {})}
    if family == "distilbert" and small:
        shape = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    if family == "qwen3" and small:
        shape |= {"num_key_value_heads": 1, "head_dim": 16}
    if family == "modernbert":
        first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
        shape |= dict.fromkeys(("bos_token_id", "cls_token_id"), first)
        shape |= dict.fromkeys(("eos_token_id", "sep_token_id"), last)
    config = AutoConfig.for_model(
        family, num_labels=1, pad_token_id=tokenizer.pad_token_id, **shape
    )
    if num_layers is not None:
        set_depth(config, num_layers)
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_config(config)
    network.save_pretrained(folder)
    if getattr(config, "type_vocab_size", 0) < 2:
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
        tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names
    tokenizer.save_pretrained(folder)
    return folder

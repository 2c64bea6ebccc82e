"""Compares a reranker's scores with those of transformers and sentence-transformers.

`python -m benchmarks.reference_scores MODEL` prints the largest difference over 200 pairs, in fp32:
of logits to transformers, where the checkpoint is a `...ForSequenceClassification`, and of scores
to sentence-transformers' `CrossEncoder`. Pairs are WikiQA's, or made up if its release is not under
`--data`. A hub id needs a network, once.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from as2ray.checkpoints.cross_encoder_files import CheckpointFiles
from as2ray.checkpoints.decoder_reranker import is_generating, read_answer_ids
from as2ray.checkpoints.loading import load, read_config, split_revision
from as2ray.models.encoder.families import max_sequence_length
from as2ray.models.packed_ranker import PackedRanker, as_packed_ranker
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report
from benchmarks.wikiqa_candidates import load_wikiqa_table

NUM_PAIRS = 200
BATCH_SIZE = 16
MAX_LENGTH = 512
"""Maximum number of tokens of a pair, where the model has as many positions; no pair is cut."""

TOLERANCE = 1e-3
"""Largest difference that is claimed. Logits of real checkpoints are some units large."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the comparison."""
    args = parse_arguments(__doc__, argv, _add_flags)
    limit_cores(args.cores)
    num_pairs = 20 if args.small else NUM_PAIRS
    length = min(MAX_LENGTH, max_sequence_length(read_config(args.model)))
    ranker = as_packed_ranker(load(args.model, dtype="fp32", device="cpu", max_length=length))
    rows = _select_short_pairs(ranker, load_wikiqa_table(args.data, args.small), num_pairs)
    questions, candidates = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    differences = {
        "transformers": _compare_transformers(ranker, args.model, questions, candidates),
        "sentence-transformers": _compare_cross_encoder(
            ranker, args.model, questions, candidates, length
        ),
    }
    claims = [
        Claim(
            f"{args.model} scores as {library} does, within {TOLERANCE:g}",
            "not run" if difference is None else f"{difference:.2e} over {rows.num_rows} pairs",
            None if difference is None else difference <= TOLERANCE,
        )
        for library, difference in differences.items()
    ]
    write_report("reference_scores", args, claims, differences)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or hub id of a reranker")


def _select_short_pairs(ranker: PackedRanker, rows: pa.Table, num_pairs: int) -> pa.Table:
    """Returns the first pairs that are tokenized whole: libraries cut longer ones elsewhere."""
    rows = rows.slice(0, 10 * num_pairs)
    tokenizer = ranker.tokenizer
    questions = tokenizer.tokenize_texts(rows["question"].to_pylist(), 10**6).lengths
    candidates = tokenizer.tokenize_texts(rows["candidate"].to_pylist(), 10**6).lengths
    fits = questions + candidates + tokenizer.num_special_tokens <= tokenizer.max_length
    fits &= questions <= tokenizer.max_question_length
    short = rows.filter(pa.array(fits)).slice(0, num_pairs)
    if not short.num_rows:
        sys.exit(f"no pair has at most {tokenizer.max_length} tokens")
    return short


@torch.inference_mode()
def _compare_transformers(
    ranker: PackedRanker, model: str, questions: list[str], candidates: list[str]
) -> float | None:
    """Returns the largest difference of logits; None if the head is not transformers' own."""
    name, revision = split_revision(model)
    if ranker.tokenizer.prompt:
        return _compare_prompts(ranker, model, questions, candidates)
    architectures = read_config(model).architectures or []
    if not any("ForSequenceClassification" in architecture for architecture in architectures):
        return None
    network = AutoModelForSequenceClassification.from_pretrained(
        name, dtype=torch.float32, trust_remote_code=False, **revision
    ).eval()
    hf_tokenizer: Any = ranker.hf_tokenizer
    parts = []
    for start in range(0, len(questions), BATCH_SIZE):
        texts = (part[start : start + BATCH_SIZE] for part in (questions, candidates))
        inputs = hf_tokenizer(*texts, padding=True, return_tensors="pt")
        parts.append(network(**inputs).logits)
    expected = torch.cat(parts).numpy()
    sequences = ranker.tokenizer.encode(questions, candidates)
    found = ranker.predict_logits(ranker.pack(sequences), len(sequences))
    if expected.shape[1] == 1:
        expected, found = expected[:, 0], found[:, 1]
    return float(np.abs(found - expected).max())


@torch.inference_mode()
def _compare_prompts(
    ranker: PackedRanker, model: str, questions: list[str], candidates: list[str]
) -> float:
    """Returns the largest difference of a decoder's logits, pair by pair over the whole prompt."""
    name, revision = split_revision(model)
    config, tokenizer = read_config(model), ranker.tokenizer
    hf_tokenizer: Any = ranker.hf_tokenizer
    auto_class: Any = AutoModelForSequenceClassification
    if is_generating(config):
        auto_class = AutoModelForCausalLM
        answers = read_answer_ids(CheckpointFiles(name, revision), config, hf_tokenizer)
    network = auto_class.from_pretrained(name, dtype=torch.float32, **revision).eval()
    expected = []
    for question, candidate in zip(questions, candidates):
        ids: list[int] = []
        for segment in tokenizer.prompt:
            text = segment.replace("{instruction}", tokenizer.instruction)
            text = text.replace("{question}", question).replace("{candidate}", candidate)
            ids += hf_tokenizer(text, add_special_tokens=False)["input_ids"]
        logits = network(torch.tensor([ids])).logits[0]
        if is_generating(config):
            logits = logits[-1, answers]
        expected.append(float(logits[0] - logits[1]) if len(logits) == 2 else float(logits[0]))
    sequences = tokenizer.encode(questions, candidates)
    logits_of_as2ray = ranker.predict_logits(ranker.pack(sequences), len(sequences))
    sign = 1 if network.config.num_labels == 1 or is_generating(config) else -1
    return float(
        np.abs(logits_of_as2ray[:, 1] - logits_of_as2ray[:, 0] - sign * np.array(expected)).max()
    )


def _compare_cross_encoder(
    ranker: PackedRanker, model: str, questions: list[str], candidates: list[str], length: int
) -> float | None:
    """Returns the largest difference of scores; None without the library or with two labels."""
    try:
        from sentence_transformers import CrossEncoder
    except ImportError:
        return None
    if ranker.tokenizer.prompt:  # it does not know the prompt of a published decoder
        return None
    name, revision = split_revision(model)
    theirs = CrossEncoder(name, device="cpu", max_length=length, **revision)
    if ranker.network.config.num_labels != 1:
        return None
    expected = theirs.predict(list(zip(questions, candidates)), batch_size=BATCH_SIZE)
    rankings = ranker.rank_many([(q, [c]) for q, c in zip(questions, candidates)])
    found = np.array([ranking[0].score for ranking in rankings])
    return float(np.abs(found - expected).max())


if __name__ == "__main__":
    main()

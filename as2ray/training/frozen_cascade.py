"""Makes a cascade of a finished ranker: exits on its frozen network, which drop by margins.

The ranker itself stays the last exit. Its own scores teach the other exits, so no labels are
needed: any questions with candidates serve.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as config_dataclass
from torch.nn import functional

from as2ray.cascade.cost import EncoderShape
from as2ray.cascade.margins import Risk, check_num_questions
from as2ray.checkpoints.loading import build_ranker, load
from as2ray.checkpoints.saving import check_new_path, save
from as2ray.errors import CheckpointError, EvaluationError
from as2ray.evaluation.cascade_replay import CascadeReplay
from as2ray.evaluation.margin_path import fit_margins
from as2ray.models.cascade import CascadeNetwork, CascadeRanker
from as2ray.models.pointwise import PointwiseRanker
from as2ray.models.quantization import fit_activation_ranges
from as2ray.models.ranker import Ranker
from as2ray.tables.filters import filter_table
from as2ray.tables.schema import question_indices
from as2ray.tables.score_checks import check_binary_labels

HIGH_CONFIDENCE = 0.9
"""Confidence of a bound by Learn then Test."""
BATCH_SIZE = 256


@config_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CascadeConfig:
    """How the exits of a finished ranker are fitted, and what they may lose."""

    exit_layers: tuple[PositiveInt, ...] | None = None
    """Number of layers below each exit that may be used; by default every layer."""
    drop_ratios: tuple[Annotated[float, Field(ge=0, lt=1)], ...] | None = None
    """Drop ratio after each exit but the last, or one for all, instead of margins with a bound."""
    max_loss: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Bound on the mean of 1 - 1 / (place that the cascade gives to the ranker's first)."""
    use_labels: bool = False
    """Bound the loss of reciprocal rank against the labels instead."""
    keep_top: PositiveInt | None = None
    """Bound the probability that one of the ranker's first candidates is dropped: so many."""
    at_least: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """With `keep_top`: probability that none of them is dropped."""
    high_confidence: bool = False
    """Let the mean loss stay below the bound with a probability of 90 % over the choice of the
    questions; otherwise the expected loss does. It needs more questions."""
    int8: bool = False
    """Fit the ranges of activations that int8 needs. Where the ranker's dtype is then int8, exits
    and margins are fitted to its scores in int8."""
    epochs: PositiveInt = 20
    """Epochs of the exits' classifiers; the encoder is not trained."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of AdamW."""
    max_train_pairs: PositiveInt = 20_000
    """Maximum number of pairs that train the exits' classifiers, and that order the margins."""
    seed: NonNegativeInt = 0
    """Seed of the classifiers' weights and of the division of the questions."""

    @property
    def risk(self) -> Risk:
        """What is bounded."""
        if self.keep_top is not None:
            return "top_k"
        return "reciprocal_rank" if self.use_labels else "first_place"

    @property
    def bound(self) -> tuple[float, float | None]:
        """The bound on the loss, and its confidence."""
        max_loss = self.max_loss if self.keep_top is None else 1.0 - self.at_least
        return max_loss, HIGH_CONFIDENCE if self.high_confidence else None


@dataclass(frozen=True)
class _Parts:
    """Tables of different questions."""

    heads: pa.Table
    path: pa.Table
    calibration: pa.Table


def make_cascade(
    model: str | Path | Ranker,
    table: pa.Table,
    output: str | Path | None = None,
    *,
    calibration_table: pa.Table | None = None,
    config: CascadeConfig | None = None,
) -> CascadeRanker:
    """Makes a cascade of a finished ranker, which stays its last exit.

    The encoder is not trained: where nothing is dropped, scores equal the ranker's bit for bit. The
    exits' classifiers learn the ranker's log-odds. Candidates are dropped by margins, whose loss is
    bounded for questions that are exchangeable with those of the calibration; see `RiskBound`.

    Args:
        model: A pointwise ranker: a checkpoint folder, a hub id, or the ranker itself, which is not
            changed.
        table: A candidates table. Labels are read only with `use_labels`.
        output: New folder for the cascade; by default it is not saved.
        calibration_table: Other questions, which choose the margins. By default a quarter of
            `table`; another quarter then orders the margins, and half trains the classifiers.
        config: Exits, bound and training.

    Raises:
        CheckpointError: The model is no pointwise ranker, or the output exists.
        ConfigError: Exits that the encoder does not have, or drop ratios that do not fit them.
        EvaluationError: Too few questions with two or more candidates for the bound, or labels of
            one kind alone.
    """
    config = config or CascadeConfig()
    if output is not None:
        check_new_path(output)
    parts = _divide(table, calibration_table, config)
    monolith = load(model) if isinstance(model, str | Path) else model
    if not isinstance(monolith, PointwiseRanker):
        raise CheckpointError(
            f"{type(monolith).__name__} cannot become a cascade",
            fix="choose a pointwise ranker: a classifier with 1 or 2 labels and no exits",
        )
    cascade = _build_cascade(monolith, config)
    if config.int8:
        fit_activation_ranges(cascade, parts.heads, config.seed)
    _fit_heads(cascade, parts.heads, config)
    if config.drop_ratios is None:
        max_loss, confidence = config.bound
        exit_layers, margins = fit_margins(
            _score(cascade, parts.path),
            _score(cascade, parts.calibration),
            config.risk,
            max_loss,
            confidence,
            config.keep_top or 1,
        )
        cascade.prune_exits(exit_layers)
        cascade.margins = margins
    # The exits imitate the ranker's log-odds, so its calibration is theirs.
    cascade.calibration = monolith.calibration * len(cascade.exit_layers)
    cascade.threshold = monolith.threshold
    if output is not None:
        save(cascade, output)
    return cascade


def _divide(table: pa.Table, calibration_table: pa.Table | None, config: CascadeConfig) -> _Parts:
    """Divides the questions with two or more candidates at random into three parts."""
    rows = _usable_rows(table)
    held_out = None if calibration_table is None else _usable_rows(calibration_table)
    if config.drop_ratios is not None:
        return _Parts(_limit_pairs(rows, config), rows[:0], rows[:0])
    if held_out is not None:
        rows = rows.filter(pc.invert(pc.is_in(rows["question"], held_out["question"].unique())))
    # By text: the same question may have two ids.
    question_index = np.asarray(rows["question"].combine_chunks().dictionary_encode().indices)
    num_questions = int(question_index.max(initial=-1)) + 1
    order = np.random.default_rng(config.seed).permutation(num_questions)
    shares = (0.5, 0.75) if held_out is None else (0.8, 1.0)
    bounds = [0, *(round(num_questions * share) for share in shares), num_questions]
    heads, path, rest = (
        rows.filter(pa.array(np.isin(question_index, order[start:end])))
        for start, end in itertools.pairwise(bounds)
    )
    calibration = rest if held_out is None else held_out
    if config.use_labels:
        check_binary_labels(calibration["label"].to_numpy())
        path, calibration = (filter_table(part, "clean") for part in (path, calibration))
    num_calibration = len(calibration["question_id"].unique())
    check_num_questions(num_calibration, *config.bound)
    if not (heads.num_rows and path.num_rows):
        raise EvaluationError(
            f"{num_questions} questions with two or more candidates, beside those of a "
            "calibration table, cannot be divided into those that train the exits and those that "
            "order the margins",
            fix="give more or other questions",
        )
    return _Parts(_limit_pairs(heads, config), _limit_pairs(path, config), calibration)


def _usable_rows(table: pa.Table) -> pa.Table:
    """Returns the rows of the questions with two or more candidates: one loses nothing."""
    question_index = question_indices(table)
    rows = table.filter(pa.array(np.bincount(question_index)[question_index] > 1))
    if not rows.num_rows:
        raise EvaluationError(
            f"none of the {len(table['question_id'].unique()):,} questions has two or more "
            "candidates, so there is nothing to drop"
        )
    return rows


def _limit_pairs(table: pa.Table, config: CascadeConfig) -> pa.Table:
    """Returns whole questions with at most `max_train_pairs` pairs, sampled at random; or one."""
    question_index = question_indices(table)
    sizes = np.bincount(question_index)
    order = np.random.default_rng(config.seed).permutation(len(sizes))
    num_kept = max(1, int(np.sum(np.cumsum(sizes[order]) <= config.max_train_pairs)))
    return table.filter(pa.array(np.isin(question_index, order[:num_kept])))


def _build_cascade(monolith: PointwiseRanker, config: CascadeConfig) -> CascadeRanker:
    num_layers = monolith.network.config.num_hidden_layers
    exit_layers = config.exit_layers or tuple(range(1, num_layers + 1))
    if exit_layers[-1] < num_layers:
        exit_layers = (*exit_layers, num_layers)
    torch.manual_seed(config.seed)
    network = CascadeNetwork.from_classifier(monolith.network, exit_layers)
    cascade = build_ranker(CascadeRanker, network, monolith.tokenizer, monolith.hf_tokenizer)
    assert isinstance(cascade, CascadeRanker)
    cascade.dtype, cascade.use_fused_layers = monolith.dtype, monolith.use_fused_layers
    cascade.max_batch_tokens = monolith.max_batch_tokens
    cascade.activation_ranges = monolith.activation_ranges
    if config.drop_ratios is not None:
        ratios = config.drop_ratios
        cascade.drop_ratios = ratios[0] if len(ratios) == 1 else ratios
    return cascade.eval().to(monolith.device)


def _fit_heads(cascade: CascadeRanker, table: pa.Table, config: CascadeConfig) -> None:
    """Trains the partial classifiers to give the last exit's log-odds."""
    heads = cascade.network.heads[:-1]
    if not len(heads):
        return
    pooled, log_odds = cascade.predict_pooled(cascade.tokenizer.encode(*_texts(table)))
    targets = torch.from_numpy(log_odds).to(cascade.device)
    inputs = [torch.from_numpy(pooled[:, i].copy()).to(cascade.device) for i in range(len(heads))]
    if not bool(targets.isfinite().all()):
        raise EvaluationError("the ranker gives scores that are not finite", fix="score in fp32")
    steps_per_epoch = -(-len(targets) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(heads.parameters(), config.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=config.epochs * steps_per_epoch
    )
    heads.train()
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.epochs):
        order = torch.randperm(len(targets), generator=generator)
        for rows in order.split(BATCH_SIZE):  # type: ignore[no-untyped-call]
            logits = (head.layers(part[rows]) for head, part in zip(heads, inputs))
            losses = [
                functional.mse_loss(part[:, 1] - part[:, 0], targets[rows]) for part in logits
            ]
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    heads.eval()


def _score(cascade: CascadeRanker, table: pa.Table) -> CascadeReplay:
    """Scores a table with all exits."""
    sequences = cascade.tokenizer.encode(*_texts(table))
    return CascadeReplay(
        table,
        cascade.exit_layers,
        cascade.predict_sequence_exits(sequences),
        sequences.lengths,
        EncoderShape.from_config(cascade.network.config),
    )


def _texts(table: pa.Table) -> tuple[list[str], list[str]]:
    return table["question"].to_pylist(), table["candidate"].to_pylist()

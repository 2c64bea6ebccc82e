"""Makes a cascade of a finished ranker: exits on its network, which drop by margins.

The network is frozen, and the ranker itself stays the last exit; or network and exits are trained
together (self-distillation), and the last exit is held to the ranker. The ranker's own scores teach
the exits, so no labels are needed: any questions with candidates serve.
"""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.nn import functional

from as2ray.cascade.cost import EncoderShape
from as2ray.cascade.margins import check_num_questions
from as2ray.checkpoints.loading import build_ranker, load
from as2ray.checkpoints.saving import check_new_path, save
from as2ray.errors import CheckpointError, ConfigError, EvaluationError
from as2ray.evaluation.cascade_replay import CascadeReplay
from as2ray.evaluation.margin_path import (
    fit_bm25_weights,
    fit_last_bm25_weight,
    fit_margins,
    measure_last_exit,
)
from as2ray.losses.distillation import DistillationLoss
from as2ray.models.calibration import fit_isotonic
from as2ray.models.cascade import CascadeNetwork, CascadeRanker
from as2ray.models.packed_ranker import PackedRanker
from as2ray.models.padded_reference import check_packed_scores
from as2ray.models.pointwise import PointwiseRanker
from as2ray.models.quantization import fit_activation_ranges
from as2ray.models.ranker import Ranker
from as2ray.progress import task
from as2ray.tables.filters import filter_table
from as2ray.tables.parquet import write_part
from as2ray.tables.schema import LOGIT_COLUMNS, check_is_table, question_indices
from as2ray.tables.score_checks import check_binary_labels
from as2ray.training.cascade_config import CascadeConfig
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.run_job import train
from as2ray.training.tracking import TrackingConfig

BATCH_SIZE = 256
JOINT_BATCH_SIZE, JOINT_TEMPERATURE = 32, 3.0
"""Pairs of a step of the joint training, and by what its logits are divided: at 1, pairs of which
the ranker is sure teach nothing."""
MAX_CHECKED_QUESTION_PAIRS = 1_000
"""Pairs of which the longest and the shortest are scored by transformers, too."""
MAX_DEV_PAIRS = 1_000
"""Pairs that are evaluated after each epoch of the joint training; they select nothing."""

TrainJob = Callable[[TrainingJob, Path], Path]
"""Trains a job in a folder of its own, and returns the folder of the ranker."""


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
    train_job: TrainJob = train,
    scratch: Path | None = None,
) -> CascadeRanker:
    """Makes a cascade of a finished ranker, which stays its last exit.

    The encoder is not trained: with nothing dropped, scores equal the ranker's bit for bit. With
    `config.use_labels` they are the ranker's with a part of BM25 that is fitted to the labels. The
    exits' classifiers learn the ranker's log-odds. Candidates are dropped by margins, whose loss is
    bounded for questions that are exchangeable with those of the calibration; see `RiskBound`.

    With `config.joint` encoder and exits are then trained together (self-distillation, Zhang et al.
    2019, with a finished teacher). The bound is on what dropping loses against the last exit; what
    separates the last exit from the ranker, here or because of BM25, is measured and stored beside
    it.

    Args:
        model: A pointwise ranker: a checkpoint folder, a hub id, or the ranker itself, which is not
            changed.
        table: A candidates table. Labels are read with `use_labels` and in the joint training. Of
            questions that trained the ranker it knows the answers, so that BM25 gets no part.
        output: New folder for the cascade; by default it is not saved.
        calibration_table: Other questions, which choose the margins. By default a quarter of
            `table`. All other questions order the margins, and two thirds of them (with a
            calibration table four fifths) train the classifiers, too.
        config: Exits, bound and training.
        train_job: Runs the joint training; by default in this process.
        scratch: New folder for the files of the joint training; by default a temporary one.

    Raises:
        CheckpointError: The model is no pointwise ranker, its packed scores are not those of
            transformers on pairs of the table, or the output exists.
        ConfigError: Exits that the encoder does not have, drop ratios that do not fit them, or what
            is given is no table or no configuration.
        EvaluationError: Too few questions with two or more candidates for the bound, or labels of
            one kind alone.
    """
    config = CascadeConfig() if config is None else config
    if not isinstance(config, CascadeConfig):
        raise ConfigError(f"config must be an as2ray.CascadeConfig, not {config!r:.200}")
    for each in (table, *([] if calibration_table is None else [calibration_table])):
        check_is_table(each)
    if output is not None:
        check_new_path(output)
    parts = _divide(table, calibration_table, config)
    monolith = _load_pointwise(model)
    cascade = _train_exits(monolith, parts, config, train_job, scratch)
    _choose_margins(cascade, monolith, parts, config)
    if output is not None:
        save(cascade, output)
    return cascade


def train_exits(
    model: str | Path | Ranker,
    table: pa.Table,
    calibration_table: pa.Table | None = None,
    config: CascadeConfig | None = None,
    *,
    train_job: TrainJob = train,
    scratch: Path | None = None,
) -> CascadeRanker:
    """Makes a cascade as `make_cascade` does, whose margins are not chosen yet.

    Args:
        model: See `make_cascade`.
        table: See `make_cascade`.
        calibration_table: Questions that `table` may not train.
        config: Exits and training; its bound is not read.
        train_job: See `make_cascade`.
        scratch: See `make_cascade`.
    """
    config = config or CascadeConfig()
    parts = _divide(table, calibration_table, config.without_bound())
    return _train_exits(_load_pointwise(model), parts, config, train_job, scratch)


def choose_margins(
    cascade: CascadeRanker,
    model: str | Path | Ranker,
    table: pa.Table,
    calibration_table: pa.Table | None = None,
    config: CascadeConfig | None = None,
) -> None:
    """Chooses the margins of a cascade of `train_exits`, which is changed.

    Args:
        cascade: A cascade with all its exits.
        model: The ranker that it was made of.
        table: The table that its exits were trained with.
        calibration_table: Other questions, which choose the margins; see `make_cascade`.
        config: The configuration of `train_exits`, and the bound.

    Raises:
        EvaluationError: Too few questions with two or more candidates for the bound.
    """
    config = config or CascadeConfig()
    parts = _divide(table, calibration_table, config)
    _choose_margins(cascade, _load_pointwise(model), parts, config)


def _load_pointwise(model: str | Path | Ranker) -> PointwiseRanker:
    return check_pointwise(load(model) if isinstance(model, str | Path) else model)


def _train_exits(
    monolith: PointwiseRanker,
    parts: _Parts,
    config: CascadeConfig,
    train_job: TrainJob,
    scratch: Path | None,
) -> CascadeRanker:
    if config.joint and config.label_weight:
        check_binary_labels(parts.heads["label"].to_numpy())
    cascade = _build_cascade(monolith, config)
    pairs = _limit_pairs(parts.heads, MAX_CHECKED_QUESTION_PAIRS, config.seed)
    check_packed_scores(monolith, monolith.tokenizer.encode(*_texts(pairs)))
    if config.int8:
        fit_activation_ranges(cascade, parts.heads, config.seed)
    if len(cascade.exit_layers) > 1:
        log_odds = _fit_heads(cascade, parts.heads, config)
        if config.joint:
            has_ranges = bool(cascade.activation_ranges)
            with TemporaryDirectory() if scratch is None else nullcontext(scratch) as folder:
                cascade = _train_jointly(cascade, parts, log_odds, config, train_job, Path(folder))
            if has_ranges:  # Those of before are of other weights.
                fit_activation_ranges(cascade, parts.heads, config.seed)
    return cascade


def _choose_margins(
    cascade: CascadeRanker, monolith: PointwiseRanker, parts: _Parts, config: CascadeConfig
) -> None:
    # The exits imitate the ranker's log-odds, so its calibration is theirs.
    calibrations = dict.fromkeys(cascade.exit_layers, monolith.calibration)
    if config.drop_ratios is None:
        max_loss, confidence = config.bound
        # The order of the margins needs many questions more than it needs new ones: a step that
        # loses nothing on a few costs much on others.
        heads = filter_table(parts.heads, "clean") if config.use_labels else parts.heads
        order = pa.concat_tables([heads, parts.path])
        num_pairs = len(parts.calibration) + len(order)
        with task("scores of all exits", num_pairs, "pairs", counts_rows=True):
            calibration, path = (_score(cascade, t) for t in (parts.calibration, order))
        scores = calibration.scores[:, -1]  # those of a ranker that was not changed
        weights: dict[int, float] = {}
        if config.use_bm25:
            # On what trained the exits, they would need BM25 less.
            held_out = path.take(slice(len(heads), None))
            last_weight = 0.0
            if config.use_labels:
                last_weight = fit_last_bm25_weight(held_out if config.joint else path)
            weights = fit_bm25_weights(held_out, last_weight)
            calibration, path = calibration.with_bm25(weights), path.with_bm25(weights)
        exit_layers, margins = fit_margins(
            path,
            calibration,
            config.risk,
            max_loss,
            confidence,
            config.keep_top or 1,
        )
        bm25_margin = None
        if exit_layers[0] == 0:
            bm25_margin, *values = margins.values
            exit_layers, margins = exit_layers[1:], replace(margins, values=tuple(values))
        cascade.prune_exits(exit_layers)
        if config.joint:
            num_pairs = len(parts.calibration)
            with task("scores of the ranker", num_pairs, "pairs", counts_rows=True):
                scores = monolith.predict_table(parts.calibration).scores
        if margins.bound is not None and (config.joint or weights.get(exit_layers[-1])):
            change = measure_last_exit(calibration, scores)
            margins = replace(margins, bound=replace(margins.bound, last_exit_loss=change))
        # Where BM25 lowers the scores of an exit, they become the ranker's probabilities again.
        for layer in [layer for layer in exit_layers if weights.get(layer)]:
            lowered = calibration.scores[:, calibration.exit_layers.index(layer)]
            calibrations[layer] = tuple(
                fit_isotonic(lowered, c(scores)) for c in monolith.calibration
            )
        cascade.margins, cascade.bm25_margin = margins, bm25_margin
        cascade.bm25_weights = [weights.get(layer, 0.0) for layer in exit_layers]
    cascade.calibration = tuple(c for layer in cascade.exit_layers for c in calibrations[layer])
    plain = monolith.calibration * len(cascade.exit_layers)
    cascade.plain_calibration = () if cascade.calibration == plain else plain
    cascade.threshold = monolith.threshold


def check_pointwise(ranker: Ranker) -> PointwiseRanker:
    """Returns the ranker if it can become a cascade.

    Raises:
        CheckpointError: It is no pointwise ranker.
    """
    if not isinstance(ranker, PointwiseRanker):
        raise CheckpointError(
            f"{type(ranker).__name__} cannot become a cascade",
            fix="choose a pointwise ranker: a classifier with 1 or 2 labels and no exits",
        )
    return ranker


def held_out_questions(
    table: pa.Table, calibration_table: pa.Table | None, config: CascadeConfig
) -> pa.Table:
    """Returns the questions with which `make_cascade` chooses the margins; all if it does not."""
    rows = _divide(table, calibration_table, config).calibration
    return rows if rows.num_rows else _usable_rows(table)


def _divide(table: pa.Table, calibration_table: pa.Table | None, config: CascadeConfig) -> _Parts:
    """Divides the questions with two or more candidates at random into three parts."""
    rows = _usable_rows(table)
    held_out = None if calibration_table is None else _usable_rows(calibration_table)
    if config.drop_ratios is not None:
        max_pairs, seed = config.max_train_pairs, config.seed
        return _Parts(_limit_pairs(rows, max_pairs, seed), rows[:0], rows[:0])
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
    calibration = _first_lists(calibration)
    num_calibration = len(calibration["question_id"].unique())
    check_num_questions(num_calibration, *config.bound)
    if not (heads.num_rows and path.num_rows):
        raise EvaluationError(
            f"{num_questions} questions with two or more candidates, beside those of a "
            "calibration table, cannot be divided into those that train the exits and those that "
            "order the margins",
            fix="give more or other questions",
        )
    max_pairs, seed = config.max_train_pairs, config.seed
    heads, path = (_limit_pairs(part, max_pairs, seed) for part in (heads, path))
    return _Parts(heads, path, calibration)


def _first_lists(table: pa.Table) -> pa.Table:
    """Returns one list of candidates for each text of a question.

    Lists of a repeated question are no independent draws, so a bound does not hold over them.
    """
    first = table.group_by("question", use_threads=False).aggregate([("question_id", "first")])
    return table.filter(pc.is_in(table["question_id"], first["question_id_first"]))


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


def _limit_pairs(table: pa.Table, max_pairs: int, seed: int) -> pa.Table:
    """Returns whole questions with at most `max_pairs` pairs, sampled at random; or one."""
    question_index = question_indices(table)
    sizes = np.bincount(question_index)
    order = np.random.default_rng(seed).permutation(len(sizes))
    num_kept = max(1, int(np.sum(np.cumsum(sizes[order]) <= max_pairs)))
    return table.filter(pa.array(np.isin(question_index, order[:num_kept])))


def _build_cascade(monolith: PointwiseRanker, config: CascadeConfig) -> CascadeRanker:
    num_layers = monolith.network.config.num_hidden_layers
    exit_layers = config.exit_layers or _default_exits(monolith.network.config)
    if exit_layers[-1] < num_layers:
        exit_layers = (*exit_layers, num_layers)
    torch.manual_seed(config.seed)
    network = CascadeNetwork.from_classifier(monolith.network, exit_layers)
    cascade = build_ranker(CascadeRanker, network, monolith.tokenizer, monolith.hf_tokenizer)
    assert isinstance(cascade, CascadeRanker)
    cascade.activation_ranges = monolith.activation_ranges
    if config.drop_ratios is not None:
        ratios = config.drop_ratios
        cascade.drop_ratios = ratios[0] if len(ratios) == 1 else ratios
    return _score_like(monolith, cascade)


def _default_exits(config: Any) -> tuple[int, ...]:
    """Returns all layers; of an encoder with windows those in which each token sees all others."""
    num_layers = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or []
    is_mixed = "full_attention" in types and len(set(types)) > 1
    exits = range(1, num_layers + 1)
    return tuple(n for n in exits if not is_mixed or types[n - 1] == "full_attention")


def _score_like(ranker: PackedRanker, cascade: CascadeRanker) -> CascadeRanker:
    """Returns the cascade, which from now on scores with the number format of a ranker."""
    cascade.dtype, cascade.use_fused_layers = ranker.dtype, ranker.use_fused_layers
    cascade.max_batch_tokens = ranker.max_batch_tokens
    return cascade.eval().to(ranker.device)


def _fit_heads(cascade: CascadeRanker, table: pa.Table, config: CascadeConfig) -> np.ndarray:
    """Trains the partial classifiers to give the last exit's log-odds, which it returns."""
    heads = cascade.network.heads[:-1]
    with task("states of the exits", len(table), "pairs", counts_rows=True):
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
    with task("training of the exits", config.epochs, "epochs") as advance:
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
            advance()
    heads.eval()
    return log_odds


def _train_jointly(
    cascade: CascadeRanker,
    parts: _Parts,
    log_odds: np.ndarray,
    config: CascadeConfig,
    train_job: TrainJob,
    root: Path,
) -> CascadeRanker:
    """Trains encoder and exits together, to give the last exit's log-odds of before."""
    label_weight = config.label_weight
    if label_weight is None:
        label_weight = 0.5 if _is_labeled(parts.heads) else 0.0
    dev = _limit_pairs(parts.path if len(parts.path) else parts.heads, MAX_DEV_PAIRS, config.seed)
    logits = dict(zip(LOGIT_COLUMNS, (np.zeros_like(log_odds), log_odds)))
    teacher = pa.table({"candidate_id": parts.heads["candidate_id"], **logits})
    tables = {"train": parts.heads, "dev": dev, "teacher": teacher}
    for name, table in tables.items():
        (root / name).mkdir(parents=True)
        write_part(table, root / name / "part-0.parquet")
    rates = config.joint_learning_rate, 10 * config.joint_learning_rate
    job = TrainingJob(
        ModelSpec(str(save(cascade, root / "start")), cascade.tokenizer.max_length),
        (str(root / "train"),),
        {"dev": str(root / "dev")} if _is_labeled(dev) else {},
        TrainingConfig(
            epochs=config.joint_epochs,
            global_batch_size=JOINT_BATCH_SIZE,
            learning_rate=rates[0],
            head_learning_rate=rates[1],
            select_by="epoch",
            seed=config.seed,
        ),
        DistillationLoss(alpha=label_weight, temperature=JOINT_TEMPERATURE),
        teacher_logits=((str(root / "teacher"),),),
        tracking=TrackingConfig(tensorboard=False),
    )
    trained = load(train_job(job, root / "run"), device="cpu")
    assert isinstance(trained, CascadeRanker)
    return _score_like(cascade, trained)


def _is_labeled(table: pa.Table) -> bool:
    return len(pc.unique(table["label"])) == 2


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

"""CERBERUS: what a step from stored logits costs, what storing them costs, and what heads cost.

Knows our rankers, the loop and the logit store; Ray runs the store's actor alone.

    a student's step from stored logits, beside its plain step and one with teachers in the loop
    the store with one actor of one core, beside packed ranking on one core of this process
    a body with three heads, beside the plain encoder (Table 5, with parameters)

The first two are MiniLM's; the third has BERT-base's shape and random weights, on which time does
not depend.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForSequenceClassification, BertConfig

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.checkpoints.saving import save
from as2ray.corpora.preparation import read_split
from as2ray.data.packed_dataset import LOGITS, TEACHERS, MicroBatch, Stream
from as2ray.distributed.cluster import ray_session
from as2ray.distributed.plan import WorkersConfig
from as2ray.distributed.score import store_logits
from as2ray.losses import get_loss
from as2ray.losses.distillation import DistillationLoss
from as2ray.models.cascade import CascadeNetwork, CascadeRanker
from as2ray.models.pointwise import PointwiseRanker
from as2ray.models.ranker import Ranker
from as2ray.profiling.speed_ratio import measure_alternately
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.raw_files import RawFileNotFoundError
from as2ray.tables.schema import question_indices
from as2ray.training.checkpoint_store import LocalCheckpointStore
from as2ray.training.config import SELECTION_METRIC, TrainingConfig
from as2ray.training.tracking import TrackingConfig
from as2ray.training.trainer import Trainer
from as2ray.training.validation import EvalSet
from benchmarks import asnq_shaped
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report

NUM_HEADS = 3
NUM_STUDENT_LAYERS = 3
"""Of the student: MiniLM's first."""

BODY_LAYERS = {"B11_3H1": 11, "B10_3H2": 10, "B8_3H4": 8, "B6_3H6": 6}
"""Layers of the body by the paper's names; heads have the rest of twelve."""


@dataclass(frozen=True)
class Size:
    """How much a run does."""

    num_pairs: int
    """Pairs of a turn of training: few, so that changes of the machine meet all sides alike."""
    num_turns: int
    """Of training."""
    num_scored_pairs: int
    """Pairs that a repeat scores."""
    num_repeats: int
    batch_size: int
    num_timed_pairs: int
    """Pairs that a repeat ranks with heads."""
    encoder_config: Mapping[str, int]
    """Of the encoder whose heads are timed; BERT-base's by default."""


FULL = Size(256, 24, 18_000, 5, 32, 128, {})
SMALL = Size(
    8, 1, 64, 1, 4, 8, {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
)

STARTUP_PAIRS = 32
"""Pairs that a run of the store scores to tell what its start costs."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv)
    size = SMALL if args.small else FULL
    limit_cores(args.cores)
    with TemporaryDirectory(prefix="as2ray-distillation-") as folder:
        table = _load_table(args.data, args.small, Path(folder))
        claims, results = _measure_training(table, size, Path(folder))
        for more in (_measure_scoring(table, size, Path(folder)), _measure_heads(table, size)):
            claims += more[0]
            results |= more[1]
    write_report("distillation", args, claims, results)


def _load_table(data_root: Path, small: bool, folder: Path) -> pa.Table:
    if not small:
        try:
            return read_split("wikiqa", "train", data_root / "wikiqa")
        except RawFileNotFoundError as error:
            raise SystemExit(
                f"skipped: needs the release of WikiQA under --data\n{error}"
            ) from error
    return ParquetTable.open(asnq_shaped.write_corpus(folder / "made-up", 1_000, None)).to_table()


ClaimsAndResults = tuple[list[Claim], dict[str, Any]]


def _measure_training(table: pa.Table, size: Size, folder: Path) -> ClaimsAndResults:
    """Steps of a student with three heads: from stored logits, plain, with teachers in the loop."""
    teachers = [_create_teacher(seed, folder) for seed in range(NUM_HEADS)]
    turns = [
        _sample_turn(table, size, folder / f"turn-{n}", teachers, n)
        for n in range(size.num_turns + 1)
    ]
    sides = [
        _build_student_workload(turns, size, folder / name, teachers, name)
        for name in ("stored logits", "plain", "teachers in the loop")
    ]
    plain, looped = measure_alternately(sides[0], sides[1:], size.num_turns)
    held = plain.median >= 1 / 1.05
    claims = [
        Claim("a step from stored logits: >= 1 / 1.05 x as fast as a plain one", str(plain), held),
        Claim("stored logits: x as fast as teachers in the loop", str(looped), None),
    ]
    return claims, {"stored / plain": plain.as_json(), "stored / in the loop": looped.as_json()}


TurnData = tuple[ParquetTable, tuple[ParquetTable, ...]]
"""Pairs to train on, and each teacher's logits of them."""


def _sample_turn(
    table: pa.Table, size: Size, folder: Path, teachers: Sequence[Ranker], seed: int
) -> TurnData:
    """Pairs drawn anew."""
    rows = np.random.default_rng(seed).choice(table.num_rows, size.num_pairs, False)
    files = _write_table(table.take(pa.array(rows)), folder / "table")
    return files, tuple(_store_logits(files, t, folder / str(n)) for n, t in enumerate(teachers))


def _build_student_workload(
    turns: Sequence[TurnData], size: Size, folder: Path, teachers: Sequence[Ranker], kind: str
) -> Callable[[], float]:
    """One epoch over each turn's pairs; pairs a second."""
    ranker = init_ranker(
        packaged_minilm(),
        num_layers=NUM_STUDENT_LAYERS,
        exit_layers=[NUM_STUDENT_LAYERS - 1],
        num_ranking_heads=NUM_HEADS,
    )
    training, tracking = (
        TrainingConfig(epochs=1, global_batch_size=size.batch_size),
        TrackingConfig(tensorboard=False),
    )
    lesson = get_loss("every_exit" if kind == "plain" else DistillationLoss())
    watched = {
        "dev": EvalSet.from_table(
            turns[0][0].to_table().slice(0, 1), ranker, training.max_batch_tokens
        )
    }
    numbers = count()

    def side() -> float:
        number = next(numbers)
        files, stored = turns[number]
        path = folder / str(number)
        stream = Stream(
            files,
            ranker.tokenizer,
            size.batch_size,
            teachers=stored if kind == "stored logits" else (),
        )
        data = _OnlineTeacherDataset(stream, teachers) if kind == "teachers in the loop" else stream
        loop = _TimedTrainer(
            ranker,
            lesson,
            data,
            training,
            LocalCheckpointStore(path, SELECTION_METRIC),
            watched,
            path,
            tracking,
        )
        began = time.perf_counter()
        loop.fit()
        return size.num_pairs / (loop.ended_at - began)

    return side


class _TimedTrainer(Trainer):
    """Our loop, which at the end of its epoch looks at the clock instead of validating."""

    ended_at = 0.0

    def _validate(self) -> None:
        self.ended_at = time.perf_counter()


@dataclass(frozen=True)
class _OnlineTeacherDataset:
    """A stream whose teachers score every batch when it is read."""

    dataset: Stream
    teachers: Sequence[Ranker]

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.dataset.steps

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """The stream's batches with the teachers' logits."""
        for micro in self.dataset.epoch(epoch, start):
            own = micro.batch.sequence_data
            numbered = replace(micro.batch, of_sequence={"row": np.arange(len(micro.batch))})
            logits = [t.predict_logits([numbered], len(micro.batch)) for t in self.teachers]
            taught = {**own, TEACHERS: np.concatenate(logits, 1)}
            yield replace(micro, batch=replace(micro.batch, of_sequence=taught))


def _write_table(table: pa.Table, folder: Path) -> ParquetTable:
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "part-00000.parquet")
    return ParquetTable.open(folder)


def _store_logits(files: ParquetTable, teacher: Ranker, folder: Path) -> ParquetTable:
    """A teacher's logits as the store has them."""
    table = files.to_table()
    columns = dict(zip(LOGITS, _predict_logits(teacher, table).T))
    return _write_table(pa.table({"candidate_id": table["candidate_id"], **columns}), folder)


def _predict_logits(ranker: Ranker, table: pa.Table) -> np.ndarray:
    texts = table["question"].to_pylist(), table["candidate"].to_pylist()
    return ranker.predict_logits(ranker.pack(ranker.tokenizer.encode(*texts)), table.num_rows)


def _create_teacher(seed: int, folder: Path) -> Ranker:
    """MiniLM with a head of its own, as ranking loads it."""
    made = init_ranker(packaged_minilm(), seed=seed)
    return load(save(made, folder / f"teacher-{seed}"), device="cpu")


def _measure_scoring(table: pa.Table, size: Size, folder: Path) -> ClaimsAndResults:
    """The store with one actor of one core, beside packed ranking on one core of this process."""
    ranker = folder / "teacher-0"
    loaded = load(ranker, device="cpu")
    sample = table.slice(0, size.num_scored_pairs)
    files, numbers = _write_table(sample, folder / "scored"), count()

    def in_process() -> float:
        torch.set_num_threads(1)  # as many as Ray leaves an actor of one CPU
        began = time.perf_counter()
        _predict_logits(loaded, sample)
        return len(files) / (time.perf_counter() - began)

    def one_actor() -> float:
        # What starting Ray Data and the actor costs is paid once for a corpus of millions: two
        # sizes tell it apart.
        small, whole = (
            store_logits(
                folder / name, ranker, folder / f"out-{next(numbers)}", WorkersConfig(num_workers=1)
            ).duration_s
            for name in ("scored-start", "scored")
        )
        return (len(files) - STARTUP_PAIRS) / max(
            whole - small, 1e-3
        )  # noise, where both are small

    _write_table(table.slice(0, STARTUP_PAIRS), folder / "scored-start")
    threads = torch.get_num_threads()
    with ray_session():
        (ratio,) = measure_alternately(one_actor, [in_process], size.num_repeats, warm_up=False)
    torch.set_num_threads(threads)
    claim = Claim("one actor: >= 0.9 x packed in this process", str(ratio), ratio.median >= 0.9)
    return [claim], {"one actor / in process": ratio.as_json()}


def _measure_heads(table: pa.Table, size: Size) -> ClaimsAndResults:
    """A body with three heads beside the plain encoder: time and parameters (Table 5)."""
    tokenizer = init_ranker(packaged_minilm()).tokenizer
    rows = table.slice(0, size.num_timed_pairs)
    rankers: dict[str, Ranker] = {}
    for name, body in {"plain": 0, **BODY_LAYERS}.items():
        network = AutoModelForSequenceClassification.from_config(BertConfig(**size.encoder_config))
        if name == "plain":
            rankers[name] = PointwiseRanker(network, tokenizer)
        else:
            made = CascadeNetwork.from_encoder(network, [body], num_ranking_heads=NUM_HEADS)
            rankers[name] = CascadeRanker(made, tokenizer)
    for ranker in rankers.values():
        ranker.eval()
        ranker.use_fused_layers = True
    sides = {name: _build_ranking_workload(ranker, rows) for name, ranker in rankers.items()}
    ratios = measure_alternately(
        sides["plain"], [sides[name] for name in BODY_LAYERS], size.num_repeats
    )
    results: dict[str, Any] = {}
    for name, ratio in zip(BODY_LAYERS, ratios):
        parameters = sum(p.numel() for p in rankers[name].parameters())
        results[name] = {**ratio.as_json(), "parameters": parameters}
    first = ratios[0]
    claim = Claim("B11_3H1: <= 1.25 x the plain encoder's time", str(first), first.median <= 1.25)
    others = [
        Claim(f"{n}: x the plain encoder's time", str(r), None) for n, r in zip(BODY_LAYERS, ratios)
    ]
    return [claim, *others[1:]], results


def _build_ranking_workload(ranker: Ranker, rows: pa.Table) -> Callable[[], float]:
    """Pairs a second, from tokens."""
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    question, encoded = question_indices(rows), ranker.tokenizer.encode(*texts)

    def side() -> float:
        began = time.perf_counter()
        ranker.predict_sequences(encoded, question)
        return rows.num_rows / (time.perf_counter() - began)

    return side


if __name__ == "__main__":
    main()

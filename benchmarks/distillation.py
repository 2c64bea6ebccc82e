"""Measures the cost of CERBERUS: of training from stored logits, of storing them, and of heads.

It compares

    a student's step from stored logits with a plain step and with a step that runs the teachers
    storing logits with one actor of one core with packed ranking on one core of this process
    a body with three heads with the plain encoder (Table 5, with parameters)

The first two use MiniLM. The third has BERT-base's shape and random weights, on which time does not
depend.
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
import ray
import torch
from transformers import AutoModelForSequenceClassification, BertConfig

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.checkpoints.saving import save
from as2ray.corpora.preparation import read_split
from as2ray.data.packed_dataset import MicroBatch, PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.distributed.score import score_table
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.losses import get_loss
from as2ray.losses.distillation import DistillationLoss
from as2ray.models.cascade import CascadeNetwork, CascadeRanker
from as2ray.models.packed_ranker import PackedRanker, as_packed_ranker
from as2ray.models.pointwise import PointwiseRanker
from as2ray.profiling.speed_ratio import measure_alternately
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.raw_files import RawFileNotFoundError
from as2ray.tables.schema import LOGIT_COLUMNS, TEACHER_LOGITS, question_indices
from as2ray.training.checkpoint_store import LocalCheckpointStore
from as2ray.training.config import TrainingConfig
from as2ray.training.tracking import TrackingConfig
from as2ray.training.trainer import Trainer
from as2ray.training.validation import EvalSet
from benchmarks import asnq_shaped
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report

NUM_HEADS = 3
NUM_STUDENT_LAYERS = 3
"""The student has MiniLM's first layers."""

BODY_LAYERS = {"B11_3H1": 11, "B10_3H2": 10, "B8_3H4": 8, "B6_3H6": 6}
"""Layers of the body, by the paper's names; the heads have the rest of twelve layers."""


@dataclass(frozen=True)
class Size:
    """Size of a run."""

    num_pairs: int
    """Pairs per turn of training: few, so that changes of the machine affect all sides equally."""
    num_turns: int
    """Turns of training."""
    num_scored_pairs: int
    """Pairs scored per repeat."""
    num_startup_pairs: int
    """Pairs of a run of the logit store that measures the time of its start, which is subtracted.
    In a small run the difference would be noise."""
    num_repeats: int
    batch_size: int
    num_timed_pairs: int
    """Pairs per repeat that are ranked with heads."""
    encoder_config: Mapping[str, int]
    """Changes of BERT-base's configuration for the encoder whose heads are timed."""


FULL = Size(256, 24, 18_000, 32, 5, 32, 128, {})
SMALL = Size(
    8, 1, 64, 0, 1, 4, 8, {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv)
    size = SMALL if args.small else FULL
    limit_cores(args.cores)
    with TemporaryDirectory(prefix="as2ray-distillation-") as folder:
        table = _load_table(args.data, args.small, Path(folder))
        claims, results = _measure_training(table, size, Path(folder))
        for more_claims, more_results in (
            _measure_scoring(table, size, Path(folder)),
            _measure_heads(table, size),
        ):
            claims += more_claims
            results |= more_results
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
    """Measures a student's steps: from stored logits, plain, and with teachers in the loop."""
    teachers = [_create_teacher(seed, folder) for seed in range(NUM_HEADS)]
    turns = [
        _sample_turn(table, size, folder / f"turn-{n}", teachers, n)
        for n in range(size.num_turns + 1)
    ]
    workloads = [
        _build_student_workload(turns, size, folder / name, teachers, name)
        for name in ("stored logits", "plain", "teachers in the loop")
    ]
    to_plain, to_looped = measure_alternately(workloads[0], workloads[1:], size.num_turns)
    claims = [
        Claim(
            "a step from stored logits: >= 1 / 1.05 x as fast as a plain one",
            str(to_plain),
            to_plain.median >= 1 / 1.05,
        ),
        Claim("stored logits: x as fast as teachers in the loop", str(to_looped), None),
    ]
    return claims, {
        "stored / plain": to_plain.as_json(),
        "stored / in the loop": to_looped.as_json(),
    }


TurnData = tuple[ParquetTable, tuple[ParquetTable, ...]]
"""Pairs to train on, and the logits of each teacher for them."""


def _sample_turn(
    table: pa.Table, size: Size, folder: Path, teachers: Sequence[PackedRanker], seed: int
) -> TurnData:
    """Samples the pairs of a turn and stores their logits."""
    rows = np.random.default_rng(seed).choice(table.num_rows, size.num_pairs, False)
    files = _write_table(table.take(pa.array(rows)), folder / "table")
    return files, tuple(_store_logits(files, t, folder / str(n)) for n, t in enumerate(teachers))


def _build_student_workload(
    turns: Sequence[TurnData], size: Size, folder: Path, teachers: Sequence[PackedRanker], kind: str
) -> Callable[[], float]:
    """Returns a workload that trains one epoch on the next turn's pairs; pairs per second."""
    ranker = init_ranker(
        packaged_minilm(),
        num_layers=NUM_STUDENT_LAYERS,
        exit_layers=[NUM_STUDENT_LAYERS - 1],
        num_ranking_heads=NUM_HEADS,
    )
    config = TrainingConfig(epochs=1, global_batch_size=size.batch_size)
    loss = get_loss("all_exits" if kind == "plain" else DistillationLoss())
    # The trainer needs a table that selects the best checkpoint; here it is never evaluated.
    dev_table = turns[0][0].to_table().slice(0, 1)
    dev = EvalSet.from_table(dev_table, ranker, config.max_batch_tokens)
    numbers = count()

    def workload() -> float:
        number = next(numbers)
        files, stored = turns[number]
        path = folder / str(number)
        reader = PairReader(
            files, ranker.tokenizer, teachers=stored if kind == "stored logits" else ()
        )
        dataset = PackedDataset(reader, size.batch_size)
        is_online = kind == "teachers in the loop"
        trainer = _TimedTrainer(
            ranker,
            loss,
            _OnlineTeacherDataset(dataset, teachers) if is_online else dataset,
            config,
            LocalCheckpointStore(path),
            {"dev": dev},
            path,
            TrackingConfig(tensorboard=False),
        )
        started_at = time.perf_counter()
        trainer.fit()
        return size.num_pairs / (trainer.ended_at - started_at)

    return workload


class _TimedTrainer(Trainer):
    """A trainer that records the end of its epoch instead of evaluating."""

    ended_at = 0.0

    def _validate(self) -> None:
        self.ended_at = time.perf_counter()


@dataclass(frozen=True)
class _OnlineTeacherDataset:
    """A data set whose teachers score every batch when it is read."""

    dataset: PackedDataset
    teachers: Sequence[PackedRanker]

    @property
    def steps(self) -> int:
        """Number of steps of an epoch."""
        return self.dataset.steps

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """Yields the data set's batches with the teachers' logits."""
        for micro_batch in self.dataset.epoch(epoch, start):
            batch = micro_batch.batch
            numbered = replace(batch, sequence_data={"row": np.arange(len(batch))})
            logits = [t.predict_logits([numbered], len(batch)) for t in self.teachers]
            sequence_data = {**batch.sequence_data, TEACHER_LOGITS: np.concatenate(logits, 1)}
            yield replace(micro_batch, batch=replace(batch, sequence_data=sequence_data))


def _write_table(table: pa.Table, folder: Path) -> ParquetTable:
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "part-00000.parquet")
    return ParquetTable.open(folder)


def _store_logits(files: ParquetTable, teacher: PackedRanker, folder: Path) -> ParquetTable:
    """Writes a teacher's logits in the format of the logit store."""
    table = files.to_table()
    columns = dict(zip(LOGIT_COLUMNS, _predict_logits(teacher, table).T))
    return _write_table(pa.table({"candidate_id": table["candidate_id"], **columns}), folder)


def _predict_logits(ranker: PackedRanker, table: pa.Table) -> np.ndarray:
    texts = table["question"].to_pylist(), table["candidate"].to_pylist()
    return ranker.predict_logits(ranker.pack(ranker.tokenizer.encode(*texts)), table.num_rows)


def _create_teacher(seed: int, folder: Path) -> PackedRanker:
    """Creates a MiniLM ranker with its own head, loaded for ranking."""
    ranker = init_ranker(packaged_minilm(), seed=seed)
    return as_packed_ranker(load(save(ranker, folder / f"teacher-{seed}"), device="cpu"))


def _measure_scoring(table: pa.Table, size: Size, folder: Path) -> ClaimsAndResults:
    """Compares the logit store with one actor of one core to packed ranking in this process."""
    ranker_path = folder / "teacher-0"
    ranker = as_packed_ranker(load(ranker_path, device="cpu"))
    sample = table.slice(0, size.num_scored_pairs)
    files, numbers = _write_table(sample, folder / "scored"), count()

    def in_process() -> float:
        torch.set_num_threads(1)  # the number that Ray sets for an actor of one CPU
        started_at = time.perf_counter()
        _predict_logits(ranker, sample)
        return len(files) / (time.perf_counter() - started_at)

    def score(name: str) -> float:
        out, workers = folder / f"out-{next(numbers)}", WorkersConfig(num_workers=1)
        return score_table(folder / name, ranker_path, out, workers).duration_s

    def one_actor() -> float:
        # Starting Ray Data and the actor takes the same time for a corpus of millions. The
        # difference between two sizes does not include it.
        startup_s = score("scored-start") if size.num_startup_pairs else 0.0
        return (len(files) - size.num_startup_pairs) / (score("scored") - startup_s)

    if size.num_startup_pairs:
        _write_table(table.slice(0, size.num_startup_pairs), folder / "scored-start")
    threads = torch.get_num_threads()
    with ray.init(address="local", include_dashboard=False, logging_level="WARNING"):
        (ratio,) = measure_alternately(one_actor, [in_process], size.num_repeats, warm_up=False)
    torch.set_num_threads(threads)
    claim = Claim("one actor: >= 0.9 x packed in this process", str(ratio), ratio.median >= 0.9)
    return [claim], {"one actor / in process": ratio.as_json()}


def _measure_heads(table: pa.Table, size: Size) -> ClaimsAndResults:
    """Compares bodies with three heads to the plain encoder: time and parameters (Table 5)."""
    tokenizer = init_ranker(packaged_minilm()).tokenizer
    rows = table.slice(0, size.num_timed_pairs)
    rankers: dict[str, PackedRanker] = {}
    for name, body_layers in {"plain": 0, **BODY_LAYERS}.items():
        network = AutoModelForSequenceClassification.from_config(BertConfig(**size.encoder_config))
        if name == "plain":
            rankers[name] = PointwiseRanker(network, tokenizer)
        else:
            cascade = CascadeNetwork.from_encoder(
                network, [body_layers], num_ranking_heads=NUM_HEADS
            )
            rankers[name] = CascadeRanker(cascade, tokenizer)
    for ranker in rankers.values():
        ranker.eval()
        ranker.use_fused_layers = True
    workloads = {name: _build_ranking_workload(ranker, rows) for name, ranker in rankers.items()}
    ratios = measure_alternately(
        workloads["plain"], [workloads[name] for name in BODY_LAYERS], size.num_repeats
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


def _build_ranking_workload(ranker: PackedRanker, rows: pa.Table) -> Callable[[], float]:
    """Returns a workload that scores all rows from tokens; its rate is pairs per second."""
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    question_index, encoded = question_indices(rows), ranker.tokenizer.encode(*texts)

    def workload() -> float:
        started_at = time.perf_counter()
        ranker.predict_sequences(encoded, question_index)
        return rows.num_rows / (time.perf_counter() - started_at)

    return workload


if __name__ == "__main__":
    main()

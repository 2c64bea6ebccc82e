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

from as2ray import checkpoint, corpora
from as2ray.corpora.files import SourceMissingError
from as2ray.distributed.cluster import connected
from as2ray.distributed.plan import Workers
from as2ray.distributed.score import score
from as2ray.evaluation.ratio import alternate
from as2ray.models.cascade import CascadeNetwork, CascadeRanker
from as2ray.models.pointwise import PointwiseRanker
from as2ray.models.ranker import Ranker
from as2ray.objectives import Distillation, objective
from as2ray.packaged import minilm
from as2ray.records import question_numbers
from as2ray.text.files import PairFiles
from as2ray.text.stream import LOGITS, TEACHERS, MicroBatch, Stream
from as2ray.training.config import SELECTION, Training
from as2ray.training.loop import Loop
from as2ray.training.run import LocalRun
from as2ray.training.tracking import Tracking
from as2ray.training.validation import Watched
from benchmarks import asnq_shaped
from benchmarks.report import Claim, arguments, finish, hold_to_cores

HEADS = 3
LAYERS = 3
"""Of the student: MiniLM's first."""

SPLITS = {"B11_3H1": 11, "B10_3H2": 10, "B8_3H4": 8, "B6_3H6": 6}
"""Layers of the body by the paper's names; heads have the rest of twelve."""


@dataclass(frozen=True)
class Size:
    """How much a run does."""

    pairs: int
    """Pairs of a turn of training: few, so that changes of the machine meet all sides alike."""
    turns: int
    """Of training."""
    scored: int
    """Pairs that a repeat scores."""
    repeats: int
    batch: int
    timed: int
    """Pairs that a repeat ranks with heads."""
    shape: Mapping[str, int]
    """Of the encoder whose heads are timed; BERT-base's by default."""


FULL = Size(256, 24, 18_000, 5, 32, 128, {})
SMALL = Size(
    8, 1, 64, 1, 4, 8, {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
)

START = 32
"""Pairs that a run of the store scores to tell what its start costs."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = arguments(__doc__, argv)
    size = SMALL if args.small else FULL
    hold_to_cores(args.cores)
    with TemporaryDirectory(prefix="as2ray-distillation-") as folder:
        table = _table(args.data, args.small, Path(folder))
        claims, results = _training(table, size, Path(folder))
        for more in (_scoring(table, size, Path(folder)), _heads(table, size)):
            claims += more[0]
            results |= more[1]
    finish("distillation", args, claims, results)


def _table(data: Path, small: bool, folder: Path) -> pa.Table:
    if not small:
        try:
            return corpora.read("wikiqa", "train", data / "wikiqa")
        except SourceMissingError as error:
            raise SystemExit(
                f"skipped: needs the release of WikiQA under --data\n{error}"
            ) from error
    return PairFiles.find(asnq_shaped.write(folder / "made-up", 1_000, None)).table()


Found = tuple[list[Claim], dict[str, Any]]


def _training(table: pa.Table, size: Size, folder: Path) -> Found:
    """Steps of a student with three heads: from stored logits, plain, with teachers in the loop."""
    teachers = [_teacher(seed, folder) for seed in range(HEADS)]
    turns = [_turn(table, size, folder / f"turn-{n}", teachers, n) for n in range(size.turns + 1)]
    sides = [
        _student(turns, size, folder / name, teachers, name)
        for name in ("stored logits", "plain", "teachers in the loop")
    ]
    plain, looped = alternate(sides[0], sides[1:], size.turns)
    held = plain.median >= 1 / 1.05
    claims = [
        Claim("a step from stored logits: >= 1 / 1.05 x as fast as a plain one", str(plain), held),
        Claim("stored logits: x as fast as teachers in the loop", str(looped), None),
    ]
    return claims, {"stored / plain": plain.as_json(), "stored / in the loop": looped.as_json()}


Turn = tuple[PairFiles, tuple[PairFiles, ...]]
"""Pairs to train on, and each teacher's logits of them."""


def _turn(
    table: pa.Table, size: Size, folder: Path, teachers: Sequence[Ranker], number: int
) -> Turn:
    """Pairs drawn anew."""
    rows = np.random.default_rng(number).choice(table.num_rows, size.pairs, False)
    files = _written(table.take(pa.array(rows)), folder / "table")
    return files, tuple(_stored(files, t, folder / str(n)) for n, t in enumerate(teachers))


def _student(
    turns: Sequence[Turn], size: Size, folder: Path, teachers: Sequence[Ranker], kind: str
) -> Callable[[], float]:
    """One epoch over each turn's pairs; pairs a second."""
    ranker = checkpoint.start(minilm(), layers=LAYERS, exits=[LAYERS - 1], heads=HEADS)
    training, tracking = Training(epochs=1, batch=size.batch), Tracking(tensorboard=False)
    lesson = objective("every_exit" if kind == "plain" else Distillation())
    watched = {"dev": Watched.pack(turns[0][0].table().slice(0, 1), ranker, training.max_tokens)}
    numbers = count()

    def side() -> float:
        number = next(numbers)
        files, stored = turns[number]
        path = folder / str(number)
        stream = Stream(
            files,
            ranker.tokenizer,
            size.batch,
            teachers=stored if kind == "stored logits" else (),
        )
        data = _InTheLoop(stream, teachers) if kind == "teachers in the loop" else stream
        loop = _Loop(
            ranker, lesson, data, training, LocalRun(path, SELECTION), watched, path, tracking
        )
        began = time.perf_counter()
        loop.fit()
        return size.pairs / (loop.ended - began)

    return side


class _Loop(Loop):
    """Our loop, which at the end of its epoch looks at the clock instead of validating."""

    ended = 0.0

    def _validate(self) -> None:
        self.ended = time.perf_counter()


@dataclass(frozen=True)
class _InTheLoop:
    """A stream whose teachers score every batch when it is read."""

    stream: Stream
    teachers: Sequence[Ranker]

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.stream.steps

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """The stream's batches with the teachers' logits."""
        for micro in self.stream.epoch(epoch, start):
            own = micro.batch.of_sequence
            numbered = replace(micro.batch, of_sequence={"row": np.arange(len(micro.batch))})
            logits = [t.logits([numbered], len(micro.batch)) for t in self.teachers]
            taught = {**own, TEACHERS: np.concatenate(logits, 1)}
            yield replace(micro, batch=replace(micro.batch, of_sequence=taught))


def _written(table: pa.Table, folder: Path) -> PairFiles:
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "part-00000.parquet")
    return PairFiles.find(folder)


def _stored(files: PairFiles, teacher: Ranker, folder: Path) -> PairFiles:
    """A teacher's logits as the store has them."""
    table = files.table()
    columns = dict(zip(LOGITS, _logits(teacher, table).T))
    return _written(pa.table({"candidate_id": table["candidate_id"], **columns}), folder)


def _logits(ranker: Ranker, table: pa.Table) -> np.ndarray:
    texts = table["question"].to_pylist(), table["candidate"].to_pylist()
    return ranker.logits(ranker.pack(ranker.tokenizer.encode(*texts)), table.num_rows)


def _teacher(seed: int, folder: Path) -> Ranker:
    """MiniLM with a head of its own, as ranking loads it."""
    made = checkpoint.start(minilm(), seed=seed)
    return checkpoint.load(checkpoint.save(made, folder / f"teacher-{seed}"), device="cpu")


def _scoring(table: pa.Table, size: Size, folder: Path) -> Found:
    """The store with one actor of one core, beside packed ranking on one core of this process."""
    ranker = folder / "teacher-0"
    loaded = checkpoint.load(ranker, device="cpu")
    sample = table.slice(0, size.scored)
    files, numbers = _written(sample, folder / "scored"), count()

    def in_process() -> float:
        torch.set_num_threads(1)  # as many as Ray leaves an actor of one CPU
        began = time.perf_counter()
        _logits(loaded, sample)
        return len(files) / (time.perf_counter() - began)

    def one_actor() -> float:
        # What starting Ray Data and the actor costs is paid once for a corpus of millions: two
        # sizes tell it apart.
        small, whole = (
            score(folder / name, ranker, folder / f"out-{next(numbers)}", Workers(count=1)).seconds
            for name in ("scored-start", "scored")
        )
        return (len(files) - START) / max(whole - small, 1e-3)  # noise, where both are small

    _written(table.slice(0, START), folder / "scored-start")
    threads = torch.get_num_threads()
    with connected():
        (ratio,) = alternate(one_actor, [in_process], size.repeats, warm_up=False)
    torch.set_num_threads(threads)
    claim = Claim("one actor: >= 0.9 x packed in this process", str(ratio), ratio.median >= 0.9)
    return [claim], {"one actor / in process": ratio.as_json()}


def _heads(table: pa.Table, size: Size) -> Found:
    """A body with three heads beside the plain encoder: time and parameters (Table 5)."""
    tokenizer = checkpoint.start(minilm()).tokenizer
    rows = table.slice(0, size.timed)
    rankers: dict[str, Ranker] = {}
    for name, body in {"plain": 0, **SPLITS}.items():
        network = AutoModelForSequenceClassification.from_config(BertConfig(**size.shape))
        if name == "plain":
            rankers[name] = PointwiseRanker(network, tokenizer)
        else:
            made = CascadeNetwork.around(network, [body], heads=HEADS)
            rankers[name] = CascadeRanker(made, tokenizer)
    for ranker in rankers.values():
        ranker.eval()
        ranker.fused = True
    sides = {name: _pass(ranker, rows) for name, ranker in rankers.items()}
    ratios = alternate(sides["plain"], [sides[name] for name in SPLITS], size.repeats)
    results: dict[str, Any] = {}
    for name, ratio in zip(SPLITS, ratios):
        parameters = sum(p.numel() for p in rankers[name].parameters())
        results[name] = {**ratio.as_json(), "parameters": parameters}
    first = ratios[0]
    claim = Claim("B11_3H1: <= 1.25 x the plain encoder's time", str(first), first.median <= 1.25)
    others = [
        Claim(f"{n}: x the plain encoder's time", str(r), None) for n, r in zip(SPLITS, ratios)
    ]
    return [claim, *others[1:]], results


def _pass(ranker: Ranker, rows: pa.Table) -> Callable[[], float]:
    """Pairs a second, from tokens."""
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    question, encoded = question_numbers(rows), ranker.tokenizer.encode(*texts)

    def side() -> float:
        began = time.perf_counter()
        ranker.score_sequences(encoded, question)
        return rows.num_rows / (time.perf_counter() - began)

    return side


if __name__ == "__main__":
    main()

"""Compares training with sentence-transformers' `CrossEncoderTrainer`, in pairs per second.

Both sides train the packaged MiniLM on the same pairs of WikiQA and TREC-QA: with AdamW, dropout
and gradient clipping, at most 128 tokens per pair, without evaluation or checkpoints. The time runs
from the tokenization of the first pair to the end of the last step. as2ray has its defaults: packed
batches, and bf16 if the hardware multiplies it. CrossEncoderTrainer has its defaults, which are
fp32, and is measured with `bf16=True` as well. Where torch sees a GPU, both sides use it.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.corpora.preparation import read_split
from as2ray.data.packed_dataset import PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.losses import LOSSES
from as2ray.profiling.speed_ratio import SpeedRatio, measure_alternately
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.raw_files import RawFileNotFoundError
from as2ray.training.checkpoint_store import LocalCheckpointStore
from as2ray.training.config import TrainingConfig
from as2ray.training.tracking import TrackingConfig
from as2ray.training.trainer import Trainer
from as2ray.training.validation import EvalSet
from benchmarks import asnq_shaped
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report

MAX_LENGTH = 128

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Size:
    """Size of a run."""

    num_pairs: int
    """Pairs per repeat."""
    num_repeats: int
    batch_sizes: tuple[int, ...]
    """Pairs per step."""


FULL = Size(192, 3, (32, 64))
GPU = Size(4_096, 3, (256,))
SMALL = Size(4, 1, (2,))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv)
    size = SMALL if args.small else GPU if DEVICE == "cuda" else FULL
    limit_cores(args.cores)
    disable_progress_bar()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    claims: list[Claim] = []
    results: dict[str, Any] = {}
    with TemporaryDirectory(prefix="as2ray-training-") as folder:
        for name, table in _load_tables(args.data, args.small):
            for batch_size in size.batch_sizes:
                default, bf16 = _compare(
                    table, batch_size, size, Path(folder) / f"{name}-{batch_size}"
                )
                results[f"{name}, {batch_size} pairs a step"] = {
                    "default": default.as_json(),
                    "bf16": bf16.as_json(),
                }
                progress = f"{name}, {batch_size} pairs a step: {default} x default, {bf16} x bf16"
                print(progress, file=sys.stderr, flush=True)
                claims += _build_claims(f"{name}, batch {batch_size}", default, bf16)
    write_report("training", args, claims, results)


def _build_claims(setting: str, default: SpeedRatio, bf16: SpeedRatio) -> list[Claim]:
    rate = float(np.median(default.rates))
    return [
        Claim(
            f"{setting} ({rate:,.0f} pairs/s): >= 2.5 x its default",
            str(default),
            default.median >= 2.5,
        ),
        Claim(f"{setting}: >= 1.3 x it with bf16", str(bf16), bf16.median >= 1.3),
    ]


def _load_tables(data_root: Path, small: bool) -> Iterator[tuple[str, pa.Table]]:
    """Yields the corpora by name; a small run has made-up words, which need no release."""
    if small:
        with TemporaryDirectory() as folder:
            corpus_folder = asnq_shaped.write_corpus(Path(folder) / "made-up", 1_000, None)
            yield "made-up words", ParquetTable.open(corpus_folder).to_table()
        return
    try:
        tables = {
            "WikiQA": read_split("wikiqa", "train", data_root / "wikiqa"),
            "TREC-QA": read_split("trecqa", "train-all", data_root / "trecqa"),
        }
    except RawFileNotFoundError as error:
        sys.exit(f"skipped: needs the releases of WikiQA and TREC-QA under --data\n{error}")
    yield from tables.items()


def _compare(table: pa.Table, batch_size: int, size: Size, folder: Path) -> tuple[SpeedRatio, ...]:
    """Returns the ratios to CrossEncoderTrainer with its defaults and with bf16."""
    folder.mkdir()
    # Two steps suffice as a warm-up.
    sizes = [2 * batch_size, *[size.num_pairs] * size.num_repeats]
    samples = [
        table.take(pa.array(np.random.default_rng(seed).choice(table.num_rows, pairs, False)))
        for seed, pairs in enumerate(sizes)
    ]
    baselines = [
        _build_peer_workload(samples, batch_size, folder / f"bf16-{bf16}", bf16)
        for bf16 in (False, True)
    ]
    return measure_alternately(
        _build_as2ray_workload(samples, batch_size, folder / "as2ray"), baselines, size.num_repeats
    )


class _TimedTrainer(Trainer):
    """A trainer that records the end of its epoch instead of evaluating."""

    ended_at = 0.0

    def _validate(self) -> None:
        self.ended_at = time.perf_counter()


def _build_as2ray_workload(
    samples: Sequence[pa.Table], batch_size: int, folder: Path
) -> Callable[[], float]:
    ranker = init_ranker(packaged_minilm(), max_length=MAX_LENGTH).to(DEVICE)
    config = TrainingConfig(epochs=1, global_batch_size=batch_size)
    # The trainer needs a table that selects the best checkpoint; here it is never evaluated.
    dev = EvalSet.from_table(samples[0].slice(0, 1), ranker, config.max_batch_tokens)
    numbers = count()

    def workload() -> float:
        number = next(numbers)
        path = folder / str(number)
        path.mkdir(parents=True)
        pq.write_table(samples[number], path / "part-00000.parquet")
        reader = PairReader(ParquetTable.open(path), ranker.tokenizer)
        trainer = _TimedTrainer(
            ranker,
            LOSSES["cross_entropy"],
            PackedDataset(reader, batch_size, seed=number),
            config,
            LocalCheckpointStore(path),
            {"dev": dev},
            path,
            TrackingConfig(tensorboard=False),
        )
        started_at = time.perf_counter()
        trainer.fit()
        return reader.num_examples / (trainer.ended_at - started_at)

    return workload


class _TrainingClock(TrainerCallback):
    """Records when training starts and ends, without the trainer's preparations."""

    def __init__(self) -> None:
        self.started_at = self.ended_at = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.started_at = time.perf_counter()

    def on_train_end(self, *_: object, **__: object) -> None:
        self.ended_at = time.perf_counter()


def _build_peer_workload(
    samples: Sequence[pa.Table], batch_size: int, folder: Path, bf16: bool
) -> Callable[[], float]:
    model = CrossEncoder(str(packaged_minilm()), num_labels=1, max_length=MAX_LENGTH, device=DEVICE)
    numbers = count()

    def workload() -> float:
        sample, clock = samples[next(numbers)], _TrainingClock()
        columns = {"question": sample["question"], "candidate": sample["candidate"]}
        labels = {"label": sample["label"].cast(pa.float32())}
        settings = CrossEncoderTrainingArguments(
            output_dir=str(folder),
            num_train_epochs=1,
            per_device_train_batch_size=batch_size,
            use_cpu=DEVICE == "cpu",
            bf16=bf16,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = CrossEncoderTrainer(
            model=model,
            args=settings,
            train_dataset=Dataset(pa.table({**columns, **labels})),
            callbacks=[clock],
        )
        trainer.train()
        return float(sample.num_rows / (clock.ended_at - clock.started_at))

    return workload


if __name__ == "__main__":
    main()

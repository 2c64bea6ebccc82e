"""Training: pairs a second of our loop, as users run it, and of sentence-transformers' trainer.

Knows our loop and `CrossEncoderTrainer`. Must not know Ray: both sides run in this process.

Both sides train the same packaged MiniLM on the same pairs of WikiQA and TREC-QA: AdamW, dropout
and clipping on, 128 tokens at most, no validation, nothing saved. Time runs from the first pair
that is tokenised to the end of the last step. Ours has its defaults: packed batches, and bf16 where
the hardware multiplies it. Theirs has its defaults, which are fp32 on a CPU, and then `bf16=True`.
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
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from as2ray import checkpoint, corpora
from as2ray.corpora.files import SourceMissingError
from as2ray.evaluation.ratio import Ratio, alternate
from as2ray.objectives import OBJECTIVES
from as2ray.packaged import minilm
from as2ray.text.files import PairFiles
from as2ray.text.stream import Stream
from as2ray.training.config import SELECTION, Training
from as2ray.training.loop import Loop
from as2ray.training.run import LocalRun
from as2ray.training.tracking import Tracking
from as2ray.training.validation import Watched
from benchmarks import asnq_shaped
from benchmarks.report import Claim, arguments, finish, hold_to_cores

MAX_LENGTH = 128


@dataclass(frozen=True)
class Size:
    """How much a run does."""

    pairs: int
    """Pairs of a repeat."""
    repeats: int
    batches: tuple[int, ...]
    """Pairs of a step."""


FULL = Size(192, 3, (32, 64))
SMALL = Size(8, 1, (4,))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = arguments(__doc__, argv)
    size = SMALL if args.small else FULL
    hold_to_cores(args.cores)
    disable_progress_bar()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    claims: list[Claim] = []
    results: dict[str, Any] = {}
    with TemporaryDirectory(prefix="as2ray-training-") as folder:
        for name, table in _tables(args.data, args.small):
            for batch in size.batches:
                default, bf16 = _compare(table, batch, size, Path(folder) / f"{name}-{batch}")
                results[f"{name}, {batch} pairs a step"] = {
                    "default": default.as_json(),
                    "bf16": bf16.as_json(),
                }
                told = f"{name}, {batch} pairs a step: {default} x default, {bf16} x bf16"
                print(told, file=sys.stderr, flush=True)
                claims += _claims(f"{name}, batch {batch}", default, bf16)
    finish("training", args, claims, results)


def _claims(where: str, default: Ratio, bf16: Ratio) -> list[Claim]:
    rate = float(np.median(default.ours))
    return [
        Claim(
            f"{where} ({rate:,.0f} pairs/s): >= 2.5 x its default",
            str(default),
            default.median >= 2.5,
        ),
        Claim(f"{where}: >= 1.3 x it with bf16", str(bf16), bf16.median >= 1.3),
    ]


def _tables(data: Path, small: bool) -> Iterator[tuple[str, pa.Table]]:
    """The corpora by name; in a small run made-up words, which need no release."""
    if small:
        with TemporaryDirectory() as folder:
            made = asnq_shaped.write(Path(folder) / "made-up", 1_000, None)
            yield "made-up words", PairFiles.find(made).table()
        return
    try:
        tables = {
            "WikiQA": corpora.read("wikiqa", "train", data / "wikiqa"),
            "TREC-QA": corpora.read("trecqa", "train-all", data / "trecqa"),
        }
    except SourceMissingError as error:
        sys.exit(f"skipped: needs the releases of WikiQA and TREC-QA under --data\n{error}")
    yield from tables.items()


def _compare(table: pa.Table, batch: int, size: Size, folder: Path) -> tuple[Ratio, ...]:
    """How many times as fast ours is as their default, and as theirs with bf16."""
    folder.mkdir()
    # Two steps are enough to warm up.
    sizes = [2 * batch, *[size.pairs] * size.repeats]
    samples = [
        table.take(pa.array(np.random.default_rng(seed).choice(table.num_rows, pairs, False)))
        for seed, pairs in enumerate(sizes)
    ]
    theirs = [_theirs(samples, batch, folder / f"bf16-{bf16}", bf16) for bf16 in (False, True)]
    return alternate(_ours(samples, batch, folder / "ours"), theirs, size.repeats)


class _Loop(Loop):
    """Our loop, which at the end of its epoch looks at the clock instead of validating."""

    ended = 0.0

    def _validate(self) -> None:
        self.ended = time.perf_counter()


def _ours(samples: Sequence[pa.Table], batch: int, folder: Path) -> Callable[[], float]:
    ranker = checkpoint.start(minilm(), max_length=MAX_LENGTH)
    training, tracking = Training(epochs=1, batch=batch), Tracking(tensorboard=False)
    # The loop insists on a table to choose the best checkpoint by; here it is never scored.
    watched = {"dev": Watched.pack(samples[0].slice(0, 1), ranker, training.max_tokens)}
    numbers = count()

    def side() -> float:
        number = next(numbers)
        path = folder / str(number)
        path.mkdir(parents=True)
        pq.write_table(samples[number], path / "part-00000.parquet")
        stream = Stream(PairFiles.find(path), ranker.tokenizer, batch, seed=number)
        objective = OBJECTIVES["cross_entropy"]
        run = LocalRun(path, SELECTION)
        loop = _Loop(ranker, objective, stream, training, run, watched, path, tracking)
        began = time.perf_counter()
        loop.fit()
        return len(stream.files) / (loop.ended - began)

    return side


class _Clock(TrainerCallback):
    """When training began and ended, without the trainer's preparations."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.began = time.perf_counter()

    def on_train_end(self, *_: object, **__: object) -> None:
        self.ended = time.perf_counter()


def _theirs(
    samples: Sequence[pa.Table], batch: int, folder: Path, bf16: bool
) -> Callable[[], float]:
    model = CrossEncoder(str(minilm()), num_labels=1, max_length=MAX_LENGTH, device="cpu")
    numbers = count()

    def side() -> float:
        sample, clock = samples[next(numbers)], _Clock()
        columns = {"question": sample["question"], "candidate": sample["candidate"]}
        labels = {"label": sample["label"].cast(pa.float32())}
        settings = CrossEncoderTrainingArguments(
            output_dir=str(folder),
            num_train_epochs=1,
            per_device_train_batch_size=batch,
            use_cpu=True,
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
        return float(sample.num_rows / (clock.ended - clock.began))

    return side


if __name__ == "__main__":
    main()

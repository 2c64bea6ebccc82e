"""Compares a joint Two-in-One ranker with two rankers, in questions per second.

Both sides rank HotpotQA's distractor questions with the same encoder in the same precision. The
joint model reads each passage once. The other side ranks the passages with one pointwise ranker and
every sentence with another, as systems of two models do.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.compute as pc

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.checkpoints.saving import save
from as2ray.corpora.preparation import read_split
from as2ray.models.ranker import Ranker
from as2ray.models.two_in_one import TwoInOneRanker
from as2ray.profiling.speed_ratio import measure_alternately
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.raw_files import RawFileNotFoundError
from as2ray.tables.schema import count_table, group_by_passage
from benchmarks import asnq_shaped
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report

MAX_LENGTH = 512


@dataclass(frozen=True)
class Size:
    """Size of a run."""

    num_questions: int
    """Questions per pass."""
    num_repeats: int


FULL = Size(20, 7)
SMALL = Size(2, 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv)
    size = SMALL if args.small else FULL
    limit_cores(args.cores)
    table = _load_table(args.data, args.small)
    question_ids = table["question_id"].unique()[: size.num_questions]
    rows = table.filter(pc.is_in(table["question_id"], question_ids))
    with TemporaryDirectory(prefix="as2ray-two-in-one-") as folder:
        sides = [
            _build_workload(rows, Path(folder), build_pass)
            for build_pass in (_build_joint_pass, _build_two_ranker_pass)
        ]
        (ratio,) = measure_alternately(sides[0], sides[1:], size.num_repeats)
    counts, num_passages = count_table(rows), group_by_passage(rows).num_rows
    setting = (
        f"{counts.num_questions} questions, {num_passages} passages, {counts.num_pairs} sentences"
    )
    claim = Claim(f"{setting}: >= 1.8 x two rankers", str(ratio), ratio.median >= 1.8)
    write_report("two_in_one", args, [claim], {"two rankers": ratio.as_json()})


def _load_table(data_root: Path, small: bool) -> pa.Table:
    if small:
        with TemporaryDirectory() as folder:
            return ParquetTable.open(
                asnq_shaped.write_corpus(Path(folder) / "made-up", 60, None)
            ).to_table()
    try:
        return read_split("hotpotqa", "dev", data_root / "hotpotqa")
    except RawFileNotFoundError as error:
        sys.exit(f"skipped: needs HotpotQA's distractor questions under --data\n{error}")


def _build_workload(
    rows: pa.Table, folder: Path, build_pass: Callable[[pa.Table, Path], Callable[[], object]]
) -> Callable[[], float]:
    """Returns a workload that ranks all questions once; its rate is questions per second."""
    run_pass, num_questions = build_pass(rows, folder), count_table(rows).num_questions

    def workload() -> float:
        started_at = time.perf_counter()
        run_pass()
        return num_questions / (time.perf_counter() - started_at)

    return workload


def _build_joint_pass(rows: pa.Table, folder: Path) -> Callable[[], object]:
    ranker = _create_ranker(folder / "joint", is_joint=True)
    assert isinstance(ranker, TwoInOneRanker)
    passages = group_by_passage(rows)
    texts = passages["question"].to_pylist(), passages["candidate"].to_pylist()
    return lambda: ranker.predict_passages(*texts)


def _build_two_ranker_pass(rows: pa.Table, folder: Path) -> Callable[[], object]:
    passage_ranker, sentence_ranker = (
        _create_ranker(folder / name) for name in ("passages", "sentences")
    )
    passages = group_by_passage(rows)
    joined = [" ".join(sentences) for sentences in passages["candidate"].to_pylist()]
    passages = passages.set_column(passages.column_names.index("candidate"), "candidate", [joined])

    def run_pass() -> None:
        passage_ranker.predict_table(passages)
        sentence_ranker.predict_table(rows)

    return run_pass


def _create_ranker(folder: Path, is_joint: bool = False) -> Ranker:
    ranker = init_ranker(packaged_minilm(), max_length=MAX_LENGTH, is_joint=is_joint)
    return load(save(ranker, folder), device="cpu")


if __name__ == "__main__":
    main()

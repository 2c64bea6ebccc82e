"""Two-in-One: questions a second of one joint pass, and of two rankers one after the other.

Knows our rankers. Must not know Ray: both sides run in this process.

Both sides read the passages of HotpotQA's distractor questions with the same encoder in the same
precision. The joint model reads each passage once; the other side ranks the passages with one
pointwise ranker and every sentence with another, as systems of two models do.
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
from as2ray.checkpoints.loading import Ranker, load
from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.checkpoints.saving import save
from as2ray.corpora.preparation import read_split
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
    """How much a run does."""

    num_questions: int
    """Questions of a pass."""
    num_repeats: int


FULL = Size(20, 7)
SMALL = Size(2, 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv)
    size = SMALL if args.small else FULL
    limit_cores(args.cores)
    table = _load_table(args.data, args.small)
    names = table["question_id"].unique()[: size.num_questions]
    rows = table.filter(pc.is_in(table["question_id"], names))
    with TemporaryDirectory(prefix="as2ray-two-in-one-") as folder:
        sides = [
            _build_workload(rows, Path(folder), joint)
            for joint in (_build_joint_pass, _build_two_ranker_pass)
        ]
        (ratio,) = measure_alternately(sides[0], sides[1:], size.num_repeats)
    held = count_table(rows)
    text = f"{held.num_questions} questions, {group_by_passage(rows).num_rows} passages, {held.num_pairs} sentences"
    claim = Claim(f"{text}: >= 1.8 x two rankers", str(ratio), ratio.median >= 1.8)
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
    """Questions a second of a pass over all of them."""
    run, questions = build_pass(rows, folder), count_table(rows).num_questions

    def side() -> float:
        began = time.perf_counter()
        run()
        return questions / (time.perf_counter() - began)

    return side


def _build_joint_pass(rows: pa.Table, folder: Path) -> Callable[[], object]:
    ranker = _create_ranker(folder / "joint", is_joint=True)
    assert isinstance(ranker, TwoInOneRanker)
    passages = group_by_passage(rows)
    texts = passages["question"].to_pylist(), passages["candidate"].to_pylist()
    return lambda: ranker.predict_passages(*texts)


def _build_two_ranker_pass(rows: pa.Table, folder: Path) -> Callable[[], object]:
    of_passages, of_sentences = (
        _create_ranker(folder / name) for name in ("passages", "sentences")
    )
    passages = group_by_passage(rows)
    whole = [" ".join(sentences) for sentences in passages["candidate"].to_pylist()]
    passages = passages.set_column(passages.column_names.index("candidate"), "candidate", [whole])

    def run() -> None:
        of_passages.predict_table(passages)
        of_sentences.predict_table(rows)

    return run


def _create_ranker(folder: Path, is_joint: bool = False) -> Ranker:
    made = init_ranker(packaged_minilm(), max_length=MAX_LENGTH, is_joint=is_joint)
    return load(save(made, folder), device="cpu")


if __name__ == "__main__":
    main()

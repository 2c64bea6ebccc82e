"""Reading a corpus into a table, and writing prepared candidates as Parquet with a manifest.

Knows corpora, filters and their published counts. Must not know how any corpus is read.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.corpora.corpus import HUB, Corpus, Source
from as2ray.corpora.leaks import remove_leaks
from as2ray.corpora.registry import get_corpus
from as2ray.corpora.verification import add_counts, data_root
from as2ray.errors import CorpusError, LeakError
from as2ray.tables.filters import filter_tables
from as2ray.tables.fingerprint import Fingerprint
from as2ray.tables.schema import CANDIDATE_SCHEMA, TableCounts, count_table
from as2ray.text.sentences import versioned_name

ROW_GROUP_SIZE: Final = 16_384
"""Rows of a Parquet row group, which is what a reader must hold at least."""

ROWS_PER_PART: Final = 64 * ROW_GROUP_SIZE
"""Rows after which a new part file starts; a question stays in one part."""

MANIFEST: Final = "manifest.json"


def read_split(
    name: str,
    split: str,
    source: Source | None = None,
    question_filter: str = "raw",
    verify: bool = True,
    **options: Any,
) -> pa.Table:
    """The candidates of a split in memory. For ASNQ use `prepare` or `Corpus.pieces`.

    Args:
        name: A corpus of `CORPORA`.
        split: One of its splits.
        source: Its folder, one file of it, or `"hub"`; without it, its folder in the data root.
        filter: One of `FILTERS`.
        verify: Whether published counts must be met.
        options: The corpus' own options.

    Raises:
        CorpusError: Anything unknown, missing, damaged or refused by `records.validate`.
        CountMismatchError: The counts differ from the published ones.
    """
    corpus = get_corpus(name)
    tables = list(
        filter_tables(
            corpus.read_tables(split, release_path(corpus, source), **options), question_filter
        )
    )
    table = pa.concat_tables(tables) if tables else CANDIDATE_SCHEMA.empty_table()
    if verify:
        corpus.check_counts(split, question_filter, count_table(table), options)
    return table


def release_path(corpus: Corpus, source: Source | None) -> Source:
    """The source that was given, or the folder of the corpus in the data root."""
    return data_root() / corpus.name if source is None else source


def prepare_splits(
    name: str | Corpus,
    source: Source | None,
    out_dir: str | Path,
    splits: Mapping[str, str],
    verify: bool = True,
    held_out_tables: Sequence[pa.Table] = (),
    **options: Any,
) -> dict[str, Any]:
    """Writes splits as `<out_dir>/<split>/part-00000.parquet`, ... and `manifest.json`.

    All of it appears at once at the end or not at all.

    Args:
        name: A corpus of `CORPORA`, or one of another reader (`corpora.building.built`).
        source: As in `read`.
        out_dir: A folder that does not exist yet.
        splits: For each split the filter to apply.
        verify: Whether published counts must be met.
        without: Tables whose questions are left out, after the counts are compared.
        options: The corpus' own options.

    Returns:
        The manifest.

    Raises:
        CorpusError: As in `read`, or `out_dir` exists.
    """
    corpus, out = get_corpus(name) if isinstance(name, str) else name, Path(out_dir)
    if out.exists():
        raise CorpusError(
            f"{out} exists; expected a new folder",
            fix="remove it or choose another",
        )
    where = release_path(corpus, source)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        entries = {
            split: _write_split(
                corpus, split, where, partial, filter, verify, held_out_tables, options
            )
            for split, filter in splits.items()
        }
        manifest = _build_manifest(corpus, where, corpus.resolve(options), entries)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        partial.chmod(0o755)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def load(folder: str | Path, split: str) -> pa.Table:
    """A prepared split as a table.

    Raises:
        CorpusError: The folder or the split is not there.
    """
    parts = sorted((Path(folder) / split).glob("part-*.parquet"))
    if not parts:
        raise CorpusError(
            f"no part-*.parquet in {Path(folder) / split}"
            "; expected a folder that as2ray.corpora.prepare has written",
            fix="prepare the corpus first",
        )
    return pa.concat_tables([pq.read_table(part) for part in parts])


def _write_split(
    corpus: Corpus,
    split: str,
    source: Source,
    folder: Path,
    question_filter: str,
    verify: bool,
    held_out_tables: Sequence[pa.Table],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    digest, found, kept = Fingerprint(), TableCounts(0, 0, 0), TableCounts(0, 0, 0)
    (folder / split).mkdir()
    parts = 0
    tables = filter_tables(corpus.read_tables(split, source, **options), question_filter)
    for parts, part in enumerate(_split_parts(tables), 1):
        found = add_counts(found, count_table(part))
        part = remove_leaks(part, *held_out_tables) if held_out_tables else part
        kept = add_counts(kept, count_table(part))
        digest.update(part)
        path = folder / split / f"part-{parts - 1:05d}.parquet"
        pq.write_table(part, path, row_group_size=ROW_GROUP_SIZE, compression="zstd")
    if not parts:
        raise CorpusError(
            f"{corpus.name}/{split} from {source}: no rows under filter {question_filter!r}"
            "; expected at least one question",
            fix="choose another filter, split or other options",
        )
    if not kept.num_pairs:
        raise LeakError(
            f"{corpus.name}/{split}: all {found.num_questions:,} questions stand in held-out tables"
            "; expected questions of its own",
            fix="train on another split",
        )
    verified = verify and corpus.check_counts(split, question_filter, found, options)
    return {
        "filter": question_filter,
        "counts": asdict(kept),
        "leaked_questions_left_out": found.num_questions - kept.num_questions,
        "verified": verified,
        "fingerprint": digest.hexdigest(),
        "parts": parts,
    }


def _split_parts(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if sum(t.num_rows for t in held) >= ROWS_PER_PART:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _build_manifest(
    corpus: Corpus, source: Source, options: dict[str, Any], entries: dict[str, Any]
) -> dict[str, Any]:
    packages = ["as2ray", "pyarrow", "numpy", *(["datasets"] if source == HUB else [])]
    return {
        "corpus": corpus.name,
        "licence": corpus.license,
        "options": options,
        "sentence_splitter": versioned_name(options["splitter"]) if "splitter" in options else None,
        "splits": entries,
        "packages": {package: version(package) for package in packages},
    }

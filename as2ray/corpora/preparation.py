"""Reads splits of a corpus into memory, or writes them as Parquet files with a manifest."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from as2ray.corpora.corpus import HUB, Corpus, CorpusOptions, Source
from as2ray.corpora.leaks import remove_leaks
from as2ray.corpora.registry import get_corpus
from as2ray.corpora.verification import add_counts, data_root
from as2ray.errors import ConfigError, CorpusError, LeakError
from as2ray.tables.atomic import atomic_folder
from as2ray.tables.filters import filter_tables
from as2ray.tables.fingerprint import Fingerprint
from as2ray.tables.parquet import ROW_GROUP_SIZE, write_part
from as2ray.tables.schema import CANDIDATE_SCHEMA, TableCounts, count_table
from as2ray.text.sentences import versioned_name

ROWS_PER_PART: Final = 512 * ROW_GROUP_SIZE
"""Rows after which a new part file starts; all rows of a question are in one part."""

MANIFEST: Final = "manifest.json"


def read_split(
    name: str,
    split: str,
    source: Source | None = None,
    question_filter: str = "raw",
    verify: bool = True,
    **options: Any,
) -> pa.Table:
    """Reads a split into memory. For ASNQ use `prepare_splits` or `Corpus.read_tables`.

    Args:
        name: Name of a corpus.
        split: One of its splits.
        source: Its folder, one file of it, or `"hub"`; by default its folder in the data root.
        question_filter: See `as2ray.tables.filters`.
        verify: Whether the counts must be the published ones, if there are any.
        options: Options of the corpus.

    Raises:
        ConfigError: Unknown corpus, split, filter or option, or a value that is not accepted.
        CorpusError: A missing or damaged file, or rows that are not a candidates table.
        CountMismatchError: The counts differ from the published ones.
    """
    corpus = get_corpus(name)
    corpus_options = corpus.parse_options(options)
    stream = corpus.read_tables(split, release_path(corpus, source), corpus_options)
    tables = list(filter_tables(stream, question_filter))
    table = pa.concat_tables(tables) if tables else CANDIDATE_SCHEMA.empty_table()
    if verify:
        corpus.check_counts(split, question_filter, count_table(table), corpus_options)
    return table


def release_path(corpus: Corpus, source: Source | None) -> Source:
    """Returns the source, by default the folder of the corpus in the data root."""
    return data_root() / corpus.name if source is None else source


def prepare_splits(
    corpus: str | Corpus,
    source: Source | None,
    out_dir: str | Path,
    splits: Mapping[str, str],
    verify: bool = True,
    held_out_tables: Sequence[pa.Table] = (),
    min_leak_similarity: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Writes splits as `<out_dir>/<split>/part-00000.parquet`, ... and `manifest.json`.

    The folder is written atomically: it is complete or does not exist.

    Args:
        corpus: Name of a corpus, or a corpus with another reader (see
            `as2ray.corpora.record_conversion.with_quarantine`).
        source: As in `read_split`.
        out_dir: A folder that does not exist yet.
        splits: Question filter of each split.
        verify: Whether the counts must be the published ones, if there are any.
        held_out_tables: Tables whose questions are left out, after the counts are compared.
        min_leak_similarity: See `remove_leaks`.
        options: Options of the corpus.

    Returns:
        The manifest.

    Raises:
        ConfigError: As in `read_split`, or no split is named.
        CorpusError: As in `read_split`, or `out_dir` exists, or a split has no rows.
        LeakError: All questions of a split are in `held_out_tables`.
    """
    corpus = get_corpus(corpus) if isinstance(corpus, str) else corpus
    corpus_options, source = corpus.parse_options(options), release_path(corpus, source)
    if not splits:
        raise ConfigError(f"no splits; corpus {corpus.name!r} has {sorted(corpus.splits)}")
    if Path(out_dir).exists():
        raise CorpusError(f"{out_dir} exists", fix="remove it or choose another folder")
    entries: dict[str, Any] = {}
    with atomic_folder(out_dir) as folder:
        for split, question_filter in splits.items():
            name = f"{corpus.name}/{split} ({question_filter}) from {source}"
            stream = corpus.read_tables(split, source, corpus_options)
            tables = filter_tables(stream, question_filter)
            leaks = (held_out_tables, min_leak_similarity)
            counts, entry = _write_parts(tables, folder / split, *leaks, name)
            is_verified = verify and corpus.check_counts(
                split, question_filter, counts, corpus_options
            )
            entries[split] = {"question_filter": question_filter, "verified": is_verified, **entry}
        manifest = _build_manifest(corpus, source, corpus_options, entries)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def _write_parts(
    tables: Iterator[pa.Table],
    folder: Path,
    held_out_tables: Sequence[pa.Table],
    min_leak_similarity: float | None,
    name: str,
) -> tuple[TableCounts, dict[str, Any]]:
    """Writes the parts of a split; returns its counts and its entry in the manifest.

    The counts are those before the questions of `held_out_tables` are left out.
    """
    fingerprint, counts, written = Fingerprint(), TableCounts(0, 0, 0), TableCounts(0, 0, 0)
    num_parts = 0
    folder.mkdir()
    for num_parts, part in enumerate(_split_parts(tables), 1):
        counts = add_counts(counts, count_table(part))
        if held_out_tables:
            part = remove_leaks(part, *held_out_tables, min_similarity=min_leak_similarity)
        write_part(part, folder / f"part-{num_parts - 1:05d}.parquet", written.num_pairs)
        written = add_counts(written, count_table(part))
        fingerprint.update(part)
    if not num_parts:
        problem = f"{name}: no question passes the filter"
        raise CorpusError(problem, fix="choose another filter, split or other options")
    if not written.num_pairs:
        problem = f"{name}: all {counts.num_questions:,} questions are in the held-out tables"
        raise LeakError(problem, fix="train on another split")
    return counts, {
        "counts": asdict(written),
        "num_leaked_questions": counts.num_questions - written.num_questions,
        "fingerprint": fingerprint.hexdigest(),
        "parts": num_parts,
    }


def _split_parts(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    part: list[pa.Table] = []
    for table in tables:
        part.append(table)
        if sum(t.num_rows for t in part) >= ROWS_PER_PART:
            yield pa.concat_tables(part)
            part = []
    if part:
        yield pa.concat_tables(part)


def _build_manifest(
    corpus: Corpus, source: Source, options: CorpusOptions, entries: dict[str, Any]
) -> dict[str, Any]:
    packages = ["as2ray", "pyarrow", "numpy", *(["datasets"] if source == HUB else [])]
    splitter = getattr(options, "sentence_splitter", None)
    return {
        "corpus": corpus.name,
        "license": corpus.license,
        "options": asdict(options),
        "sentence_splitter": splitter and versioned_name(splitter),
        "splits": entries,
        "packages": {package: version(package) for package in packages},
    }

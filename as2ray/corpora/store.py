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

from as2ray.corpora.base import HUB, Corpus, Source
from as2ray.corpora.discover import added, data_root
from as2ray.corpora.leaks import drop
from as2ray.corpora.registry import get
from as2ray.errors import CorpusError, LeakError
from as2ray.filters import filtered
from as2ray.records import CANDIDATES, Counts, Fingerprint, count
from as2ray.text.sentences import versioned

ROW_GROUP: Final = 16_384
"""Rows of a Parquet row group, which is what a reader must hold at least."""

PART: Final = 64 * ROW_GROUP
"""Rows after which a new part file starts; a question stays in one part."""

MANIFEST: Final = "manifest.json"


def read(
    name: str,
    split: str,
    source: Source | None = None,
    filter: str = "raw",
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
    corpus = get(name)
    tables = list(filtered(corpus.pieces(split, located(corpus, source), **options), filter))
    table = pa.concat_tables(tables) if tables else CANDIDATES.empty_table()
    if verify:
        corpus.verify(split, filter, count(table), options)
    return table


def located(corpus: Corpus, source: Source | None) -> Source:
    """The source that was given, or the folder of the corpus in the data root."""
    return data_root() / corpus.name if source is None else source


def prepare(
    name: str | Corpus,
    source: Source | None,
    out_dir: str | Path,
    splits: Mapping[str, str],
    verify: bool = True,
    without: Sequence[pa.Table] = (),
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
    corpus, out = get(name) if isinstance(name, str) else name, Path(out_dir)
    if out.exists():
        raise CorpusError(
            f"{out} exists", expected="a new folder", mend="remove it or choose another"
        )
    where = located(corpus, source)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        entries = {
            split: _write_split(corpus, split, where, partial, filter, verify, without, options)
            for split, filter in splits.items()
        }
        manifest = _manifest(corpus, where, corpus.resolve(options), entries)
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
            f"no part-*.parquet in {Path(folder) / split}",
            expected="a folder that as2ray.corpora.prepare has written",
            mend="prepare the corpus first",
        )
    return pa.concat_tables([pq.read_table(part) for part in parts])


def _write_split(
    corpus: Corpus,
    split: str,
    source: Source,
    folder: Path,
    filter: str,
    verify: bool,
    without: Sequence[pa.Table],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    digest, found, kept = Fingerprint(), Counts(0, 0, 0), Counts(0, 0, 0)
    (folder / split).mkdir()
    parts = 0
    tables = filtered(corpus.pieces(split, source, **options), filter)
    for parts, part in enumerate(_parts(tables), 1):
        found = added(found, count(part))
        part = drop(part, *without) if without else part
        kept = added(kept, count(part))
        digest.update(part)
        path = folder / split / f"part-{parts - 1:05d}.parquet"
        pq.write_table(part, path, row_group_size=ROW_GROUP, compression="zstd")
    if not parts:
        raise CorpusError(
            f"{corpus.name}/{split} from {source}: no rows under filter {filter!r}",
            expected="at least one question",
            mend="choose another filter, split or other options",
        )
    if not kept.pairs:
        raise LeakError(
            f"{corpus.name}/{split}: all {found.questions:,} questions stand in held-out tables",
            expected="questions of its own",
            mend="train on another split",
        )
    verified = verify and corpus.verify(split, filter, found, options)
    return {
        "filter": filter,
        "counts": asdict(kept),
        "leaked_questions_left_out": found.questions - kept.questions,
        "verified": verified,
        "fingerprint": digest.hexdigest(),
        "parts": parts,
    }


def _parts(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if sum(t.num_rows for t in held) >= PART:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _manifest(
    corpus: Corpus, source: Source, options: dict[str, Any], entries: dict[str, Any]
) -> dict[str, Any]:
    packages = ["as2ray", "pyarrow", "numpy", *(["datasets"] if source == HUB else [])]
    return {
        "corpus": corpus.name,
        "licence": corpus.licence,
        "options": options,
        "sentence_splitter": versioned(options["splitter"]) if "splitter" in options else None,
        "splits": entries,
        "packages": {package: version(package) for package in packages},
    }

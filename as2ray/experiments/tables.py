"""Stages of candidates tables: prepared from a release or a file, sampled, checked for leaks."""

import logging
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.corpora.corpus import HUB, Corpus
from as2ray.corpora.leaks import check_leaks, remove_leaks
from as2ray.corpora.page_grades import PageOptions
from as2ray.corpora.preparation import prepare_splits, release_path
from as2ray.corpora.registry import get_corpus
from as2ray.corpora.sampling import flip_labels, sample_questions, select_split
from as2ray.corpora.verification import DATA_ROOT_VARIABLE, add_counts
from as2ray.errors import CorpusError
from as2ray.experiments.recipe import FILE_KEYS, Recipe, TableSpec
from as2ray.experiments.stage import (
    NOT_IDENTITY,
    Outputs,
    Result,
    Stage,
    StageContext,
    plain,
)
from as2ray.tables.filters import FILTER_DESCRIPTIONS, QuestionFilter, filter_mask
from as2ray.tables.fingerprint import Fingerprint
from as2ray.tables.loading import HUB_PREFIX, check_source, load_table
from as2ray.tables.parquet import ParquetTable, write_part
from as2ray.tables.raw_files import find_file
from as2ray.tables.schema import TableCounts, count_table
from as2ray.tables.source_files import check_files, describe_files, hash_table
from as2ray.text.sentences import versioned_name

log = logging.getLogger(__name__)

TABLE = "part-00000.parquet"


@dataclass(frozen=True, eq=False)
class PreparedTable(Stage):
    """A split of a corpus as Parquet files, without the questions of other tables."""

    spec: TableSpec
    without: tuple[Stage, ...] = ()
    """Tables whose questions are left out."""
    min_leak_similarity: float | None = None
    """Similarity from which a question counts as one of theirs; by default only equal texts."""
    data_dir: str | None = field(default=None, metadata=NOT_IDENTITY)
    """Absolute folder of the raw release, or `hub`."""

    def identity(self, fingerprints: Mapping[Stage, str]) -> dict[str, Any]:
        """Adds the version of the sentence splitter, and that of a corpus without files.

        Has the options as the corpus reads them, however the recipe spells them.
        """
        corpus = get_corpus(self.spec.corpus)
        options = corpus.parse_options(self.spec.corpus_options)
        splitter = options.sentence_splitter if isinstance(options, PageOptions) else None
        version = versioned_name(splitter) if splitter else None
        corpus_version = {"corpus_version": corpus.version} if corpus.version else {}
        identity = {**super().identity(fingerprints), "sentence_splitter": version}
        spec = _without_keys(identity["spec"], ("path", *FILE_KEYS))
        spec["corpus_options"] = plain({n: getattr(options, n) for n in self.spec.corpus_options})
        return identity | corpus_version | {"spec": spec}

    def check(self, results: Mapping[Stage, Result]) -> None:
        """Checks that the release is there, if nobody said where it is."""
        from as2ray.experiments.cost_model import describe_source

        source = describe_source(self.spec, self.data_dir)
        default = os.path.abspath(release_path(get_corpus(self.spec.corpus), None))
        is_default = self.data_dir == default
        if source["is_present"] is False and is_default and DATA_ROOT_VARIABLE not in os.environ:
            problem = f"no {' or '.join(source['files'])} in {source['source']}"
            raise CorpusError(problem, fix=f"set {DATA_ROOT_VARIABLE}, or {source['fix']}")

    def run(self, context: StageContext) -> Outputs:
        """Prepares the release, samples questions and flips labels."""
        return self.prepare(context, self.spec.corpus)

    def prepare(self, context: StageContext, corpus: str | Corpus) -> Outputs:
        """Runs the stage with the corpus of that name, or one with another reader."""
        spec, release, output = self.spec, context.scratch / "release", context.output
        shutil.rmtree(release, ignore_errors=True)
        manifest = prepare_splits(
            corpus,
            self.data_dir,
            release,
            {spec.split: spec.question_filter},
            spec.verify,
            min_leak_similarity=self.min_leak_similarity,
            held_out_tables=[read_table(context.path(stage)) for stage in self.without],
            **spec.corpus_options,
        )
        for path in sorted((release / spec.split).glob("*.parquet")):
            path.rename(output / path.name)
        outputs = {**manifest["splits"][spec.split], "source": describe_files(self._files())}
        if spec.label_noise or spec.num_questions is not None or spec.max_negatives is not None:
            rows = sample_rows(output, **self._sampling)
            rows = flip_labels(rows, spec.label_noise, spec.seed) if spec.label_noise else rows
            for path in output.glob("*.parquet"):
                path.unlink()
            outputs |= write_table(rows, output)
        return {**outputs, "content": outputs["fingerprint"]}

    @property
    def _sampling(self) -> dict[str, Any]:
        """Arguments of `sample_questions`."""
        names = ("num_questions", "max_negatives", "seed", "hard_negatives")
        return {name: getattr(self.spec, name) for name in names}

    def verify(self, result: Result) -> None:
        """Refuses a table whose release has changed; one whose release is gone is kept."""
        check_release(result, self._files(), f"the release of {self.spec.corpus}/{self.spec.split}")

    def _files(self) -> dict[str, Path]:
        """Returns the files that the split is read from, by name; without those that are gone."""
        return release_files(self.spec.corpus, self.spec.split, self.data_dir)

    def describe(self) -> Mapping[str, Any]:
        """See `Stage`."""
        from as2ray.experiments.cost_model import describe_source, table_pairs

        spec, num_pairs = self.spec, table_pairs(self.spec)
        source = describe_source(spec, self.data_dir)
        state = "missing: " if source["is_present"] is False else ""
        fix = f"; {source['fix']}" if source["fix"] else ""
        return {
            "data": f"{spec.corpus}/{spec.split} ({spec.question_filter})",
            "pairs": None if num_pairs is None else f"{num_pairs:,.0f}",
            "source": f"{state}{source['corpus']} ({source['license']}): {source['source']}{fix}",
        }


@dataclass(frozen=True, eq=False)
class LoadedTable(PreparedTable):
    """A table of the user's own, or a split of it, as a Parquet file."""

    def identity(self, fingerprints: Mapping[Stage, str]) -> dict[str, Any]:
        """Has the content of the file instead of its path."""
        identity = Stage.identity(self, fingerprints)
        corpus_keys = ("corpus", "corpus_options", "verify")
        spec = _without_keys(identity["spec"], corpus_keys)
        return identity | {"spec": spec | {"path": hash_table(str(self.spec.path))}}

    def check(self, results: Mapping[Stage, Result]) -> None:
        """Checks that the file exists."""
        check_source(str(self.spec.path))

    def run(self, context: StageContext) -> Outputs:
        """Loads the rows, selects those of the split, and changes them as the recipe says."""
        spec = self.spec
        rows = load_table(
            spec.path,
            columns=spec.columns,
            min_positive_grade=spec.min_positive_grade,
            max_bad_records=spec.max_bad_records,
        )
        if spec.split:
            rows = select_split(rows, spec.split_shares, spec.split, spec.seed)
        if held_out := [read_table(context.path(stage)) for stage in self.without]:
            rows = remove_leaks(rows, *held_out, min_similarity=self.min_leak_similarity)
        rows = rows.filter(pa.array(filter_mask(rows, spec.question_filter)))
        rows = sample_questions(rows, **self._sampling)
        rows = flip_labels(rows, spec.label_noise, spec.seed) if spec.label_noise else rows
        if not rows.num_rows:
            name = f"{spec.path}/{spec.split} ({spec.question_filter})"
            raise CorpusError(f"{name}: no question is left", fix="choose another filter or split")
        log.info("%s: %s", context.label.name or spec.path, count_table(rows))
        return write_table(rows, context.output)

    def verify(self, result: Result) -> None:
        """Does nothing: another content is another stage."""

    def describe(self) -> Mapping[str, Any]:
        """See `Stage`."""
        name = "/".join(filter(None, (self.spec.path, self.spec.split)))
        return {
            "data": f"{name} ({self.spec.question_filter})",
            "source": f"table {self.spec.path}",
        }


def release_files(corpus_name: str, part: str, data_dir: str | None) -> dict[str, Path]:
    """Returns the files of a split or a collection, by name; without those that are gone."""
    corpus = get_corpus(corpus_name)
    source = release_path(corpus, data_dir)
    if source == HUB:
        return {}
    paths = [find_file(Path(source), names) for names in corpus.needed_files(part)]
    return {path.name: path for path in paths if path}


def check_release(result: Result, files: Mapping[str, Path], name: str) -> None:
    """Refuses a stage whose files have changed, or are replaced by others; gone ones may be.

    Args:
        result: The stage; its output `source` describes the files that it was made of.
        files: The files as they are now.
        name: What they are, for the error.
    """
    stored = result.outputs.get("source", {})
    if not files.keys() - stored.keys():
        stored = {name: state for name, state in stored.items() if name in files}
    check_files(stored, files, name, fix="choose another --store, or remove this stage from it")


def _without_keys(spec: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns a table's settings without some, and without those of which it makes no use.

    So tables that were stored before there were hard negatives keep their digests.
    """
    unused = () if spec["hard_negatives"] else ("hard_negatives",)
    return {key: value for key, value in spec.items() if key not in (*names, *unused)}


@dataclass(frozen=True, eq=False)
class LeakCheck(Stage):
    """Refuses training tables that share questions with held-out tables."""

    train: dict[str, Stage]
    held_out: dict[str, Stage]
    min_similarity: float | None = None

    def run(self, context: StageContext) -> None:
        """Compares each training table with each held-out one."""
        for pair in product(self.train.items(), self.held_out.items()):
            tables = {name: read_table(context.path(stage)) for name, stage in pair}
            check_leaks(tables, self.min_similarity)


@dataclass(frozen=True, eq=False)
class QuestionCheck(Stage):
    """Refuses a table without a question that counts, before anything is trained for it."""

    table: Stage
    question_filter: QuestionFilter
    name: str = field(default="", metadata=NOT_IDENTITY)
    """What the recipe calls the table."""

    def run(self, context: StageContext) -> None:
        """Filters the table."""
        rows = read_table(context.path(self.table))
        if not filter_mask(rows, self.question_filter).any():
            raise CorpusError(
                f"table {self.name!r}: of {count_table(rows)} no question counts, as the report "
                f"needs {FILTER_DESCRIPTIONS[self.question_filter]}",
                fix="give candidates of one question the same question, or name another test table",
            )


def read_table(folder: Path) -> pa.Table:
    """Reads all rows of a table's folder."""
    return ParquetTable.open(folder).to_table()


def sample_rows(
    folder: Path,
    num_questions: int | None,
    max_negatives: int | None,
    seed: int,
    nested: bool = False,
    hard_negatives: int = 0,
) -> pa.Table:
    """Samples the table of a folder as `sample_questions` does; reads the texts of the sample only.

    A table of a whole collection does not fit into memory.
    """
    files = ParquetTable.open(folder)
    numbers = np.arange(len(files))
    rows = files.take(numbers, ["question_id", "label"]).append_column("row", pa.array(numbers))
    first_negatives = None if hard_negatives else max_negatives  # which are hard, texts say
    sample = sample_questions(rows, num_questions, first_negatives, seed, nested)
    texts = files.take(sample["row"].to_numpy(), pq.read_schema(files.paths[0]).names)
    if not hard_negatives:
        return texts
    return sample_questions(texts, None, max_negatives, seed, hard_negatives=hard_negatives)


def filtered_table(folder: Path, question_filter: QuestionFilter) -> pa.Table:
    """Reads the rows of a table's questions that count."""
    rows = read_table(folder)
    return rows.filter(pa.array(filter_mask(rows, question_filter)))


def write_table(rows: pa.Table, folder: Path) -> dict[str, Any]:
    """Writes a table as one Parquet file; returns its counts and fingerprint."""
    return write_tables([rows], folder)


def write_tables(tables: Iterable[pa.Table], folder: Path) -> dict[str, Any]:
    """Writes a table that arrives in chunks of whole questions, a Parquet file for each.

    Returns:
        Its counts and fingerprint, which do not depend on the chunks.
    """
    counts, fingerprint = TableCounts(0, 0, 0), Fingerprint()
    for number, rows in enumerate(tables):
        write_part(rows, folder / f"part-{number:05d}.parquet", counts.num_pairs)
        counts, fingerprint = add_counts(counts, count_table(rows)), fingerprint.update(rows)
    content = fingerprint.hexdigest()
    return {"counts": asdict(counts), "fingerprint": content, "content": content}


def prepared_table(
    spec: TableSpec,
    data_dirs: Mapping[str, str],
    without: tuple[Stage, ...] = (),
    min_leak_similarity: float | None = None,
) -> PreparedTable:
    """Returns the stage of a table, with the absolute folder of its release.

    A task of a cluster knows neither the environment of this process nor its working folder.
    """
    similarity = min_leak_similarity if without else None
    if spec.path is not None:
        is_hub = spec.path.startswith(HUB_PREFIX)
        path = spec.path if is_hub else os.path.abspath(spec.path)
        return LoadedTable(replace(spec, path=path), without, similarity)
    corpus = get_corpus(spec.corpus)
    source = release_path(corpus, data_dirs.get(corpus.name))
    data_dir = HUB if source == HUB else os.path.abspath(source)
    return PreparedTable(spec, without, similarity, data_dir)


def table_stages(recipe: Recipe, data_dirs: Mapping[str, str]) -> dict[str, PreparedTable]:
    """Returns the stages of the recipe's tables by name, held-out ones first."""
    held_out = recipe.held_out()
    stages: dict[str, PreparedTable] = {}
    for name in sorted(recipe.tables, key=lambda name: name not in held_out):
        is_dropped = name not in held_out and recipe.on_leak == "drop"
        without = tuple(stages[other] for other in sorted(held_out)) if is_dropped else ()
        similarity = recipe.min_leak_similarity
        stages[name] = prepared_table(recipe.tables[name], data_dirs, without, similarity)
    return stages


def table_checks(recipe: Recipe, tables: Mapping[str, Stage]) -> tuple[Stage, ...]:
    """Returns the stages that must succeed before a run trains.

    Where leaks are an error, one looks for them. Test tables of the user's own need questions that
    count.
    """
    names = recipe.held_out()
    train = {table for run in recipe.runs.values() for table in run.train} - names
    checks: tuple[Stage, ...] = tuple(
        QuestionCheck(tables[test], recipe.question_filter, test)
        for test in recipe.tests
        if recipe.tables[test].path
    )
    if recipe.on_leak != "error" or not train:
        return checks
    held_out = {name: tables[name] for name in sorted(names)}
    trained = {name: tables[name] for name in sorted(train)}
    return (LeakCheck(trained, held_out, recipe.min_leak_similarity), *checks)

"""`as2ray corpora`: lists, verifies, prepares, describes and compares corpora."""

import builtins
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import Field, NonNegativeInt

from as2ray.checkpoints.packaged import resolve_model_path
from as2ray.cli.console import create_console, create_console_table, validate_corpus_options
from as2ray.tables.filters import QuestionFilter

if TYPE_CHECKING:
    from as2ray.corpora.stats import CountTokens


class Corpora:
    """Raw releases, and the candidates tables that are prepared from them."""

    def list(self) -> None:
        """Lists the corpora that as2ray reads."""
        from as2ray.corpora.verification import list_corpora

        overview = create_console_table("corpus", "splits", "options", "hub", "license")
        for corpus in list_corpora():
            options = ", ".join(f"{k}={v}" for k, v in corpus.options.items())
            splits = ", ".join(corpus.splits)
            overview.add_row(corpus.name, splits, options, corpus.hub or "", corpus.license)
        create_console().print(overview)

    def verify(self, data_root: str | None = None) -> None:
        """Compares the releases in the data root with their published counts.

        Exits with status 1 if a count differs, or if there is no release.

        Args:
            data_root: By default AS2RAY_DATA, or ../shared/data.
        """
        from as2ray.corpora.verification import verify_releases

        checks = verify_releases(Path(data_root) if data_root else None)
        overview = create_console_table("corpus", "split", "name", "published", "actual", "")
        for check in checks:
            status = "ok" if check.is_ok else check.error or "DIFFERS"
            counts = (str(check.published), str(check.actual))
            overview.add_row(check.corpus, check.split, check.name, *counts, status)
        create_console().print(overview)
        num_ok = sum(check.is_ok for check in checks)
        create_console().print(f"{num_ok} of {len(checks)} counts as published")
        if num_ok < len(checks) or not checks:
            sys.exit(1)

    def prepare(
        self,
        corpus: str,
        output: str,
        splits: dict[str, QuestionFilter],
        data_dir: str | None = None,
        verify: bool = True,
        corpus_options: dict[str, Any] = {},  # noqa: B006
    ) -> None:
        """Writes splits of a corpus as Parquet files with a manifest.

        Args:
            corpus: Name of the corpus.
            output: New folder for the splits.
            splits: Questions to keep of each split, such as {"train": "raw"}.
            data_dir: Folder of the raw release, or `hub`; by default its folder in the data root.
            verify: Whether the counts must be the published ones.
            corpus_options: Options of the corpus.
        """
        from as2ray.corpora.preparation import prepare_splits

        options = validate_corpus_options(corpus, corpus_options)
        manifest = prepare_splits(corpus, data_dir, output, splits, verify, **options)
        create_console().print_json(json.dumps(manifest))

    def fetch(
        self,
        corpus: str,
        splits: builtins.list[str] = [],  # noqa: B006
        hub_revision: str | None = None,
        data_dir: str | None = None,
    ) -> None:
        """Downloads a corpus from the Hugging Face hub or its publisher and compares its counts.

        A copy of the hub is in the cache of `datasets`; recipes read it with
        `--data_dirs.CORPUS hub`. Without a network, a copy of the repository below `AS2RAY_HUB` is
        read. The files of a publisher are unpacked into the corpus' folder, where recipes look for
        them. An interrupted download resumes.

        Args:
            corpus: Name of a corpus.
            splits: Its splits, or its collections; by default all splits, of a corpus on the hub
                those that are there. Splits whose files have no address are then left out and
                named.
            hub_revision: Commit, branch or ref of the hub's copy; by default its newest one.
            data_dir: Folder for the publisher's own files, also of a corpus that is on the hub; by
                default the corpus' folder in the data root.
        """
        from as2ray.console.configuration import console_log
        from as2ray.corpora.corpus import HUB
        from as2ray.corpora.download import NoAddressError, download_split
        from as2ray.corpora.preparation import release_path
        from as2ray.corpora.registry import get_corpus
        from as2ray.corpora.verification import add_counts
        from as2ray.tables.schema import TableCounts, count_table

        console, each = create_console(), get_corpus(corpus)
        options = each.parse_options({"hub_revision": hub_revision})
        on_hub = [] if data_dir else [split for split in each.splits if each.is_on_hub(split)]
        shown: str | Path | None = None
        without_address: dict[str, builtins.list[str]] = {}
        for split in splits or on_hub or each.splits:
            source = HUB if each.is_on_hub(split) and not data_dir else release_path(each, data_dir)
            name = each.hub if source == HUB else source
            if name != shown:
                console.print(f"{corpus}: {name}, license {each.license}", soft_wrap=True)
                shown = name
            if source != HUB:
                try:
                    with console_log():
                        download_split(each, split, Path(source))
                except NoAddressError as error:
                    if splits or not each.urls:
                        raise
                    reason = f"{error.problem}; {error.fix}"
                    without_address.setdefault(reason, []).append(split)
                    continue
            if split in each.collections:
                num_texts = sum(map(len, each.read_collection(split, source)))
                is_published = each.check_collection_size(split, num_texts)
                size = f"{num_texts:,} texts"
            else:
                counts, num_bytes = TableCounts(0, 0, 0), 0
                for table in each.read_tables(split, source, options):
                    counts = add_counts(counts, count_table(table))
                    num_bytes += table.nbytes
                is_published = each.check_counts(split, "raw", counts, options)
                size = f"{counts}, {num_bytes / 1e6:,.0f} MB as a table"
            status = "as published" if is_published else "no counts are published"
            console.print(f"{split}: {size}, {status}", soft_wrap=True)
        for reason, names in without_address.items():
            console.print(f"{', '.join(names)} not fetched: {reason}", soft_wrap=True)

    def stats(
        self,
        corpus: str,
        split: str,
        question_filter: QuestionFilter = "raw",
        data_dir: str | None = None,
        corpus_options: dict[str, Any] = {},  # noqa: B006
        tokenizer: str | None = None,
    ) -> None:
        """Prints sizes, lengths and oddities of a split as JSON.

        Args:
            corpus: Name of the corpus.
            split: One of its splits.
            question_filter: Questions to keep.
            data_dir: Folder of the raw release, or `hub`; by default its folder in the data root.
            corpus_options: Options of the corpus.
            tokenizer: Folder or hub id of a model whose word pieces are counted, such as
                bert-base-uncased (Mokrii et al., Table 2); by default words are.
        """
        from as2ray.corpora.preparation import read_split
        from as2ray.corpora.stats import compute_stats

        options = validate_corpus_options(corpus, corpus_options)
        table = read_split(corpus, split, data_dir, question_filter, **options)
        count_tokens = _word_piece_counter(tokenizer) if tokenizer else None
        create_console().print_json(json.dumps(asdict(compute_stats(table, count_tokens))))

    def leaks(
        self,
        table: str,
        other_table: str,
        columns: dict[str, str] = {},  # noqa: B006
        min_similarity: Annotated[float, Field(gt=0, le=1)] = 0.75,
        max_examples: NonNegativeInt = 20,
    ) -> None:
        """Finds questions that are in two tables, such as training and test.

        Args:
            table: Folder of a prepared table, or a file such as those of `as2ray train`.
            other_table: Another one.
            columns: Names of the tables' columns, such as {"question": "q", "label": "y"}.
            min_similarity: Minimum similarity of near duplicates: the number of words that two
                questions share, divided by the number of words of both (Jaccard).
            max_examples: Maximum number of near duplicates that are printed.
        """
        from as2ray.corpora.leaks import near_duplicate_questions, shared_questions

        first, second = (_read_table(path, columns) for path in (table, other_table))
        num_shared = len(shared_questions(first, second))
        duplicates = near_duplicate_questions(first, second, min_similarity)
        overview = create_console_table("similarity", "question", "question of the other table")
        for question, other_question, similarity in duplicates[:max_examples]:
            overview.add_row(f"{similarity:.2f}", question, other_question)
        create_console().print(overview)
        create_console().print(
            f"{num_shared:,} questions are in both tables; "
            f"{len(duplicates):,} pairs have a similarity of {min_similarity:g} or more"
        )


def _read_table(path: str, columns: dict[str, str]) -> pa.Table:
    from as2ray.tables.loading import load_table
    from as2ray.tables.parquet import ParquetTable

    is_text = Path(path).is_file() and not path.endswith(".parquet")
    if is_text or columns:
        return load_table(path, columns=columns)
    return ParquetTable.open(path).to_table()


def _word_piece_counter(model: str) -> "CountTokens":
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(model))

    def count(texts: pa.ChunkedArray) -> np.ndarray:
        pieces = tokenizer(texts.to_pylist(), add_special_tokens=False)["input_ids"]
        return np.array([len(each) for each in pieces])

    return count

"""`as2ray corpora`: raw releases in, candidates tables out."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from as2ray.cli.console import create_console, create_console_table, validate_corpus_options
from as2ray.corpora.preparation import prepare_splits, read_split
from as2ray.corpora.stats import compute_stats
from as2ray.corpora.verification import list_corpora, verify_releases
from as2ray.tables.filters import QuestionFilter


class Corpora:
    """Raw releases in, candidates tables out."""

    def list(self) -> None:
        """The corpora that as2ray reads."""
        shown = create_console_table("corpus", "splits", "options", "hub", "licence")
        for corpus in list_corpora():
            options = ", ".join(f"{k}={v}" for k, v in corpus.options.items())
            splits = ", ".join(corpus.splits)
            shown.add_row(corpus.name, splits, options, corpus.hub or "", corpus.license)
        create_console().print(shown)

    def verify(self, data_root: str | None = None) -> None:
        """Compares everything found under the data root with its published counts.

        Args:
            root: By default AS2RAY_DATA, or ../shared/data.
        """
        checks = verify_releases(Path(data_root) if data_root else None)
        shown = create_console_table("corpus", "split", "what", "published", "found", "")
        for check in checks:
            state = "ok" if check.is_ok else check.error or "DIFFERS"
            shown.add_row(
                check.corpus,
                check.split,
                check.name,
                str(check.published),
                str(check.actual),
                state,
            )
        create_console().print(shown)
        wrong = sum(not check.is_ok for check in checks)
        create_console().print(f"{len(checks) - wrong} of {len(checks)} counts as published")
        if wrong or not checks:
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
            corpus: Its name.
            output: A new folder.
            splits: For each split the questions to keep, such as {"train": "raw"}.
            source: Folder of the raw release, or `hub`; by default its place in the data root.
            verify: Whether published counts must be met.
            options: The corpus' own options.
        """
        given = validate_corpus_options(corpus, corpus_options)
        manifest = prepare_splits(corpus, data_dir, output, splits, verify, **given)
        create_console().print_json(json.dumps(manifest))

    def stats(
        self,
        corpus: str,
        split: str,
        question_filter: QuestionFilter = "raw",
        data_dir: str | None = None,
        corpus_options: dict[str, Any] = {},  # noqa: B006
    ) -> None:
        """Sizes, lengths and oddities of a split.

        Args:
            corpus: Its name.
            split: One of its splits.
            filter: Questions to keep.
            source: Folder of the raw release, or `hub`; by default its place in the data root.
            options: The corpus' own options.
        """
        given = validate_corpus_options(corpus, corpus_options)
        table = read_split(corpus, split, data_dir, question_filter, **given)
        create_console().print_json(json.dumps(asdict(compute_stats(table))))

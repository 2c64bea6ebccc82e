"""`as2ray corpora`: raw releases in, candidates tables out."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from as2ray import corpora
from as2ray.commands.shown import console, known_options, table_of
from as2ray.filters import Filter


class Corpora:
    """Raw releases in, candidates tables out."""

    def list(self) -> None:
        """The corpora that as2ray reads."""
        shown = table_of("corpus", "splits", "options", "hub", "licence")
        for corpus in corpora.list_corpora():
            options = ", ".join(f"{k}={v}" for k, v in corpus.options.items())
            splits = ", ".join(corpus.splits)
            shown.add_row(corpus.name, splits, options, corpus.hub or "", corpus.licence)
        console().print(shown)

    def verify(self, root: str | None = None) -> None:
        """Compares everything found under the data root with its published counts.

        Args:
            root: By default AS2RAY_DATA, or ../shared/data.
        """
        checks = corpora.verify_all(Path(root) if root else None)
        shown = table_of("corpus", "split", "what", "published", "found", "")
        for check in checks:
            state = "ok" if check.ok else check.problem or "DIFFERS"
            shown.add_row(
                check.corpus, check.split, check.what, str(check.published), str(check.found), state
            )
        console().print(shown)
        wrong = sum(not check.ok for check in checks)
        console().print(f"{len(checks) - wrong} of {len(checks)} counts as published")
        if wrong or not checks:
            sys.exit(1)

    def prepare(
        self,
        corpus: str,
        output: str,
        splits: dict[str, Filter],
        source: str | None = None,
        verify: bool = True,
        options: dict[str, Any] = {},  # noqa: B006
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
        given = known_options(corpus, options)
        manifest = corpora.prepare(corpus, source, output, splits, verify, **given)
        console().print_json(json.dumps(manifest))

    def stats(
        self,
        corpus: str,
        split: str,
        filter: Filter = "raw",
        source: str | None = None,
        options: dict[str, Any] = {},  # noqa: B006
    ) -> None:
        """Sizes, lengths and oddities of a split.

        Args:
            corpus: Its name.
            split: One of its splits.
            filter: Questions to keep.
            source: Folder of the raw release, or `hub`; by default its place in the data root.
            options: The corpus' own options.
        """
        given = known_options(corpus, options)
        table = corpora.read(corpus, split, source, filter, **given)
        console().print_json(json.dumps(asdict(corpora.stats(table))))

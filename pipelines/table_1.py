"""Prints Table 1 of Mokrii et al. 2021 over several targets, each of its own study.

python -m pipelines.table_1 --studies '[output/squad, output/wikiqa]'
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import CLI

from as2ray.errors import As2rayError, ConfigError
from pipelines.curves import Ends, table_1


def together(studies: Sequence[str]) -> str:
    """Puts the results of `pipelines.pseudo_label` on several targets side by side, as Markdown.

    Args:
        studies: Output folders of finished studies.

    Raises:
        ConfigError: A folder without results or with damaged ones, a target that occurs twice, or
            studies with different measures.
    """
    targets: dict[str, Ends] = {}
    measures: dict[str, str] = {}
    for study in studies:
        path = Path(study) / "table1.json"
        if not path.is_file():
            raise ConfigError(
                f"{study} has no table1.json, which a finished study writes",
                fix="run python -m pipelines.pseudo_label with this --output first",
            )
        try:
            results = json.loads(path.read_text())
            study_targets, measures[study] = dict(results["targets"]), results["measure"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is damaged: {type(error).__name__}: {error}",
                fix="run python -m pipelines.pseudo_label with this --output again; it only makes "
                "what is missing",
            ) from error
        if repeated := sorted(targets.keys() & study_targets.keys()):
            raise ConfigError(
                f"{study} has the targets {repeated} again",
                fix="give the tests of the recipes different names",
            )
        targets |= study_targets
    if len(set(measures.values())) != 1:
        raise ConfigError(
            f"the studies must have one measure in common, and theirs are {measures}",
            fix="set the same first measure in the recipes",
        )
    return table_1(targets, next(iter(measures.values())))


def _print_table(studies: list[str]) -> None:
    """Prints Table 1 over several targets.

    Args:
        studies: Output folders of `pipelines.pseudo_label`.
    """
    try:
        sys.stdout.write(together(studies))
    except As2rayError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    CLI(_print_table, as_positional=False)

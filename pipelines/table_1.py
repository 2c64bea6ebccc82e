"""Table 1 of Mokrii et al. 2021 over several targets, each of which was a study of its own.

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
    """What `pipelines.pseudo_label` found on several targets, side by side, as Markdown.

    Args:
        studies: Output folders of that pipeline, finished.

    Raises:
        RecipeError: A folder without results or with damaged ones, a target twice, or studies of
            different measures.
    """
    targets: dict[str, Ends] = {}
    measures: dict[str, str] = {}
    for study in studies:
        path = Path(study) / "table1.json"
        if not path.is_file():
            raise ConfigError(
                f"{study}: no table1.json; expected the output folder of a finished study",
                fix="run python -m pipelines.pseudo_label with this --output first",
            )
        try:
            found = json.loads(path.read_text())
            told, measures[study] = dict(found["targets"]), found["measure"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: {type(error).__name__}: {error}"
                "; expected what python -m pipelines.pseudo_label writes at its end",
                fix="run it again with this --output: what is there is not made again",
            ) from error
        if twice := sorted(targets.keys() & told.keys()):
            raise ConfigError(
                f"{study}: the targets {twice} again; expected a name for each target",
                fix="name the tests of the recipes differently",
            )
        targets |= told
    if len(set(measures.values())) != 1:
        raise ConfigError(
            f"the measures {measures}; expected one measure of one or more studies",
            fix="let the recipes' first measures be the same",
        )
    return table_1(targets, next(iter(measures.values())))


def _tell(studies: list[str]) -> None:
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
    CLI(_tell, as_positional=False)

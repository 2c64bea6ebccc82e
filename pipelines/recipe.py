"""What every recipe is made of, and the command line that reads it.

Knows jsonargparse. Must not know what a pipeline does with a recipe.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from jsonargparse import ArgumentParser

from as2ray.distributed.cluster import Workers

T = TypeVar("T")

Leaks = Literal["error", "drop", "keep"]
"""What to do with training questions that stand in a dev or test table too."""


@dataclass(frozen=True)
class Data:
    """A table to train or evaluate on: a split of a corpus, and what is done to it."""

    corpus: str
    """Name of a corpus (`as2ray corpora list`)."""
    split: str
    """One of its splits."""
    filter: str = "raw"
    """Questions that are kept: `raw`, `no_all_negative` or `clean`."""
    options: dict[str, Any] = field(default_factory=dict)
    """The corpus' own options."""
    noise: float = 0.0
    """Part of the labels that is turned over (TANDA, Table 5)."""
    questions: int | None = None
    """Draw so many questions."""
    negatives: int | None = None
    """Draw at most so many negatives of each question."""
    seed: int = 0
    """Of these draws."""


def read_recipe(
    kind: type[T], arguments: Sequence[str] | None = None
) -> tuple[T, str, Workers, dict[str, str]]:
    """The recipe, output folder, workers and sources that a command line asks for.

    Args:
        kind: Dataclass of the recipe; its fields are flags and keys of the YAML file.
        arguments: The command line; by default this process'.
    """
    parser = ArgumentParser(description=kind.__doc__)
    parser.add_argument("--config", action="config", help="a recipe: a YAML file of these keys")
    parser.add_class_arguments(kind, as_group=False)
    parser.add_argument("--output", type=str, required=True, help="folder of the stages")
    parser.add_argument("--workers", type=Workers, default=Workers(), help="part of the cluster")
    parser.add_argument(
        "--sources",
        type=dict[str, str],
        default={},
        help="for each corpus its folder; by default AS2RAY_DATA/<corpus>",
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    made = vars(parser.instantiate(parser.parse_args(arguments)))
    made.pop("config")
    output, workers, sources = (made.pop(name) for name in ("output", "workers", "sources"))
    return kind(**made), output, workers, sources

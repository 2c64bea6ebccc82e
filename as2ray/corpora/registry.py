"""The corpora by name: those of as2ray, registered ones, and those of other packages.

A new corpus of as2ray is one module beside this one and one line below.
"""

from typing import Any, Final

from as2ray.corpora import (
    annotated,
    asnq,
    dpr,
    hotpotqa,
    msmarco,
    natural_questions,
    python_reference,
    qnli,
    squad,
    trecqa,
    wikiqa,
    yahoo_answers,
)
from as2ray.corpora.corpus import Corpus
from as2ray.errors import ConfigError, lookup
from as2ray.plugins import import_object, is_import_path, load_entry_points

ENTRY_POINT_GROUP: Final = "as2ray.corpora"
"""Group of the entry points by which packages offer corpora."""

CORPORA: Final[dict[str, Corpus]] = {
    corpus.name: corpus
    for corpus in (
        wikiqa.CORPUS,
        trecqa.CORPUS,
        asnq.CORPUS,
        natural_questions.CORPUS,
        squad.CORPUS,
        qnli.CORPUS,
        hotpotqa.CORPUS,
        msmarco.CORPUS,
        dpr.CORPUS,
        yahoo_answers.CORPUS,
        python_reference.CORPUS,
        annotated.CORPUS,
    )
}
"""The corpora of as2ray and those that `register_corpus` added."""


def register_corpus(corpus: Corpus) -> None:
    """Adds a corpus for this process, or replaces one that was added before.

    Other processes, such as workers of Ray, know a corpus by the entry point of an installed
    package, or by `module:name` in a recipe.

    Raises:
        ConfigError: It is no `Corpus`, or a corpus of as2ray has this name.
    """
    if _check_corpus(corpus, "register_corpus").name in _BUILT_IN:
        raise ConfigError(f"as2ray has a corpus {corpus.name!r}", fix="choose another name")
    CORPORA[corpus.name] = corpus


def get_corpus(name: str) -> Corpus:
    """Returns the corpus of that name.

    Args:
        name: Its name, or `module:name` of a `Corpus` in a module of your own.

    Raises:
        ConfigError: There is no such corpus.
    """
    if is_import_path(name):
        return _check_corpus(import_object(name, "corpus"), name)
    return CORPORA[name] if name in CORPORA else lookup(all_corpora(), name, "corpus")


def all_corpora() -> dict[str, Corpus]:
    """Returns all corpora by name; an installed package cannot replace one of `CORPORA`.

    Raises:
        ConfigError: An entry point cannot be imported, or is no `Corpus`.
    """
    offered = (
        _check_corpus(value, f"entry point {name!r}")
        for name, value in load_entry_points(ENTRY_POINT_GROUP).items()
    )
    return {corpus.name: corpus for corpus in offered} | CORPORA


def _check_corpus(value: Any, source: str) -> Corpus:
    if not isinstance(value, Corpus):
        raise ConfigError(f"{source}: expected an as2ray Corpus, not {type(value).__name__}")
    return value


_BUILT_IN: Final = frozenset(CORPORA)

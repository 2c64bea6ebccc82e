"""The corpora by name. A new corpus is one module beside this one and one line below."""

from collections.abc import Mapping
from typing import Final

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
from as2ray.errors import lookup

CORPORA: Final[Mapping[str, Corpus]] = {
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
"""All corpora."""


def get_corpus(name: str) -> Corpus:
    """Returns the corpus of that name.

    Raises:
        ConfigError: There is no such corpus.
    """
    return lookup(CORPORA, name, "corpus")

"""The corpora by name. A new corpus is one file beside this one and one line below.

Knows the `CORPUS` of each file. Must not know how any is read.
"""

from collections.abc import Mapping
from typing import Final

from as2ray.corpora import (
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
from as2ray.errors import CorpusError

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
    )
}
"""Every corpus that as2ray reads."""


def get_corpus(name: str) -> Corpus:
    """The corpus of that name.

    Raises:
        CorpusError: There is none.
    """
    if name not in CORPORA:
        raise CorpusError(
            f"unknown corpus {name!r}; expected one of {sorted(CORPORA)}",
            fix="correct the name, or add the corpus to as2ray/corpora/registry.py",
        )
    return CORPORA[name]

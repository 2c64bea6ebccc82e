"""Questions made out of sentences: what a ranker can learn from documents that nobody asked about.

Knows sentences by document. Must not know any corpus or file.

A sentence answers the question that is made of some of its own words; other sentences of its
document do not. A ranker trained on such questions knows the documents' words and how to look
for them in a candidate, and needs fewer written questions then.
"""

import re
from collections.abc import Mapping, Sequence
from random import Random

import pyarrow as pa

from as2ray.records import CANDIDATES

WORD = re.compile(r"[A-Za-z_]{3,}")
COMMON = frozenset(
    {"the", "and", "are", "for", "with", "that", "this", "its", "from", "which", "can", "has"}
    | {"have", "was", "will", "may", "when", "then", "than", "such", "any", "into", "but"}
    | {"also", "only", "other", "not"}
)
FEWEST, MOST = 3, 7
"""Words of a made question: half of its sentence's, within these bounds."""


def made_questions(
    documents: Mapping[str, Sequence[str]], negatives: int = 4, seed: int = 0
) -> pa.Table:
    """A candidates table with a question for every sentence that has enough words.

    Args:
        documents: Sentences by document.
        negatives: Other sentences of the document for each question.
        seed: Draws words and negatives.
    """
    random = Random(seed)
    rows = []
    for document, sentences in documents.items():
        for place, sentence in enumerate(sentences):
            question = question_of(sentence, random)
            others = [s for s in sentences if s != sentence]
            if question is None or not others:
                continue
            drawn = random.sample(others, min(negatives, len(others)))
            key = f"{document}#{place}"
            texts = enumerate([sentence, *drawn])
            rows += [(key, question, f"{key}-{k}", t, int(k == 0), document) for k, t in texts]
    schema = CANDIDATES.append(pa.field("document_id", pa.string()))
    columns = list(zip(*rows)) or [()] * len(schema)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema)], schema=schema)


def question_of(sentence: str, random: Random) -> str | None:
    """Half of a sentence's words in their order; None where it has too few."""
    words = [w.lower() for w in WORD.findall(sentence) if w.lower() not in COMMON]
    if len(words) <= FEWEST:
        return None
    size = max(FEWEST, min(MOST, len(words) // 2))
    return " ".join(words[i] for i in sorted(random.sample(range(len(words)), size)))

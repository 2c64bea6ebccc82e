"""How like two texts are by their words, and which of many are near-duplicates.

Knows strings. Must not know tables or files.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

_WORD = re.compile(r"\w+")


def word_set(text: str) -> frozenset[str]:
    """The different words of a text, in folded case."""
    return frozenset(_WORD.findall(text.casefold()))


def jaccard(left: frozenset[str], right: frozenset[str]) -> float:
    """Jaccard: the words of both over the words of either, 0 to 1; 1 for two without words."""
    either = len(left | right)
    return len(left & right) / either if either else 1.0


def find_near_duplicates(
    left_texts: Sequence[str], right_texts: Sequence[str], min_similarity: float
) -> Iterator[tuple[int, int, float]]:
    """Every pair of texts, one of each list, at least so like: their numbers and their likeness.

    Two sets with a Jaccard of t share one of the rarest n - ceil(t n) + 1 of the n words of either
    (Chaudhuri et al. 2006), so only texts that do are compared.

    Args:
        one: Texts.
        other: Texts to compare them with.
        least: Likeness, above 0.
    """
    left, right = ([word_set(text) for text in texts] for texts in (left_texts, right_texts))
    often = Counter(word for words in (*left, *right) for word in words)

    def rarest(words: frozenset[str]) -> list[str]:
        ranked = sorted(words, key=lambda word: (often[word], word))
        return ranked[: len(words) - _ceil(min_similarity * len(words)) + 1]

    holders: dict[str, list[int]] = defaultdict(list)
    for number, words in enumerate(right):
        for word in rarest(words):
            holders[word].append(number)
    for number, words in enumerate(left):
        for match in sorted({m for word in rarest(words) for m in holders.get(word, ())}):
            found = jaccard(words, right[match])
            if found >= min_similarity:
                yield number, match, found


def _ceil(value: float) -> int:
    # A likeness such as 0.7 is a little more or less in binary.
    return -int(-(value - 1e-9) // 1)

"""Similarity of texts by their words, and near-duplicates among many texts."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import ceil
from unicodedata import normalize

_WORD = re.compile(r"\w+")


def word_set(text: str) -> frozenset[str]:
    """Returns the distinct words of a text, in NFC and case-folded."""
    return frozenset(_WORD.findall(normalize("NFC", text).casefold()))


def jaccard(left: frozenset[str], right: frozenset[str]) -> float:
    """Returns the Jaccard similarity of two word sets, 0 to 1; two empty sets have 1."""
    union_size = len(left | right)
    return len(left & right) / union_size if union_size else 1.0


def find_near_duplicates(
    left_texts: Sequence[str], right_texts: Sequence[str], min_similarity: float
) -> Iterator[tuple[int, int, float]]:
    """Finds all pairs of a left and a right text whose Jaccard similarity is high enough.

    Two sets with a Jaccard similarity of t share one of the rarest n - ceil(t n) + 1 of the n words
    of either (Chaudhuri et al. 2006), so only texts that share such a word are compared.

    Args:
        left_texts: Texts.
        right_texts: Texts to compare them with.
        min_similarity: Lowest Jaccard similarity of a pair, above 0.

    Yields:
        Index of the left text, index of the right text, their similarity.
    """
    left, right = ([word_set(text) for text in texts] for texts in (left_texts, right_texts))
    word_counts = Counter(word for words in (*left, *right) for word in words)

    def rarest_words(words: frozenset[str]) -> list[str]:
        ranked = sorted(words, key=lambda word: (word_counts[word], word))
        # A similarity such as 0.7 is slightly more or less in binary.
        min_shared = ceil(min_similarity * len(words) - 1e-9)
        return ranked[: len(words) - min_shared + 1]

    texts_with_word: dict[str, list[int]] = defaultdict(list)
    for right_index, words in enumerate(right):
        for word in rarest_words(words):
            texts_with_word[word].append(right_index)
    for left_index, words in enumerate(left):
        matches = {i for word in rarest_words(words) for i in texts_with_word.get(word, ())}
        for right_index in sorted(matches):
            similarity = jaccard(words, right[right_index])
            if similarity >= min_similarity:
                yield left_index, right_index, similarity

"""Passages as token sequences with a marker in front of every sentence (Two-in-One, section 4.1).

Knows the pair tokenizer. Must not know models, labels or files.

    [CLS] question [SEP] sentence 1 [SEP] sentence 2 ... [SEP]

The separator in front of a sentence is its marker: a position, not a token id, for the tokens of
BERT, RoBERTa, ELECTRA and ALBERT differ. RoBERTa's pairs have two separators after a question (the
paper has one), of which the second marks. A passage longer than the window is read in several
windows, each beginning with the sentence that the one before it ended with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from as2ray.errors import RecipeError
from as2ray.text.packing import PackedBatch, Sequences, cut
from as2ray.text.tokens import CANDIDATE, QUESTION, PairTokenizer


@dataclass(frozen=True)
class Windows:
    """Windows of passages, and where their sentences stand."""

    sequences: Sequences
    """Token sequences, shape [windows]."""
    passage: np.ndarray
    """Number of each window's passage, shape [windows]."""
    window: np.ndarray
    """Number of each marker's window, ascending, shape [markers]."""
    position: np.ndarray
    """Token of each marker in its window, from 0, shape [markers]."""
    sentence: np.ndarray
    """Number of each marker's sentence, counted through all passages, shape [markers]."""

    def batches(self, budget: int) -> Iterator[PackedBatch]:
        """All windows as batches of at most `budget` tokens, longest first."""
        for which in cut(self.sequences.lengths, budget):
            yield self.pack(which)

    def pack(
        self,
        which: np.ndarray,
        of_window: Mapping[str, np.ndarray] | None = None,
        of_sentence: Mapping[str, np.ndarray] | None = None,
    ) -> PackedBatch:
        """Windows as one batch, longest first, with their sentences' markers.

        Args:
            which: Numbers of the windows, shape [n].
            of_window: Arrays over all windows; the batch takes their rows, beside `row`, the number
                of each one's passage, and `number`, its own.
            of_sentence: Arrays over all sentences; each marker takes its sentence's row, beside
                `window`, the number of its window in the batch, `sentence`, and `mark`, its own.
        """
        numbers = np.arange(len(self.sequences))
        own = {**(of_window or {}), "row": self.passage, "number": numbers}
        batch = self.sequences.pack(which, own)
        order = batch.of_sequence["number"]
        place = np.full(len(self.sequences), -1)
        place[order] = np.arange(len(order))
        here = np.flatnonzero(place[self.window] >= 0)
        here = here[np.argsort(place[self.window[here]], kind="stable")]
        window, sentence = place[self.window[here]], self.sentence[here]
        starts = np.cumsum(batch.lengths) - batch.lengths
        of_mark = {name: values[sentence] for name, values in (of_sentence or {}).items()}
        return replace(
            batch,
            marks=starts[window] + self.position[here],
            of_mark={**of_mark, "window": window, "sentence": sentence, "mark": here},
        )


def encode_passages(
    tokenizer: PairTokenizer, questions: Sequence[str], passages: Sequence[Sequence[str]]
) -> Windows:
    """Windows of passages, each with its question in front.

    A sentence that does not fit into a window of its own is cut off at its end.

    Args:
        tokenizer: Its `max_length` is the window; the question is cut at its `max_question`.
        questions: Of each passage, shape [passages].
        passages: Sentences of each, [passages][sentences].

    Raises:
        RecipeError: A passage without sentences.
    """
    empty = [number for number, sentences in enumerate(passages) if not sentences]
    if empty:
        raise RecipeError(
            f"{len(empty)} passages without sentences, first number {empty[0]}",
            expected="at least one sentence in each",
            mend="leave them out",
        )
    asked, _ = _ids(tokenizer, questions)
    texts, sizes = _ids(tokenizer, list(chain.from_iterable(passages)))
    ends = np.cumsum([len(sentences) for sentences in passages])
    frame = _Frame.of(tokenizer)
    made: list[_Window] = []
    for number, (question, end) in enumerate(zip(asked, ends)):
        head = frame.head(question[: tokenizer.max_question])
        first, room = end - len(passages[number]), tokenizer.max_length - len(head) - 1
        for begin, stop in _cuts(sizes[first:end] + 1, room + 1):
            numbers = range(first + begin, first + stop)
            made.append(frame.window(head, texts, numbers, number, tokenizer.max_length))
    return _joined(made)


def _ids(tokenizer: PairTokenizer, texts: Sequence[str]) -> tuple[list[np.ndarray], np.ndarray]:
    """Token ids of each text, and how many they are."""
    flat = tokenizer.flat(texts, tokenizer.max_length)
    ids = [flat.ids[s : s + n] for s, n in zip(flat.starts, flat.lengths)]
    return ids, flat.lengths


def _cuts(sizes: np.ndarray, room: int) -> list[tuple[int, int]]:
    """(first, one past the last) sentence of each window; neighbours share one where they can."""
    cuts, begin = [], 0
    while True:
        fits = int(np.searchsorted(np.cumsum(sizes[begin:]), room, side="right"))
        stop = begin + max(1, fits)
        cuts.append((begin, stop))
        if stop >= len(sizes):
            return cuts
        # The last sentence again, unless it was alone or leaves no room for the next.
        shared = stop - 1
        again = shared > begin and sizes[shared] + sizes[stop] <= room
        begin = shared if again else stop


@dataclass(frozen=True)
class _Window:
    token_ids: np.ndarray
    token_types: np.ndarray
    passage: int
    position: np.ndarray
    sentence: np.ndarray


@dataclass(frozen=True)
class _Frame:
    """The special tokens around question and sentences, and their types."""

    before: np.ndarray
    """Ids before the question."""
    between: np.ndarray
    """Ids between question and candidate; the last marks a sentence."""
    after: int
    """Id at the end."""
    types: tuple[int, int]
    """Of the question with what stands around it, and of the candidate."""

    @classmethod
    def of(cls, tokenizer: PairTokenizer) -> "_Frame":
        places = [place for place, _ in tokenizer.layout]
        q, c = places.index(QUESTION), places.index(CANDIDATE)
        types = (tokenizer.layout[q][1], tokenizer.layout[c][1])
        before, between = (np.array(part, np.int32) for part in (places[:q], places[q + 1 : c]))
        return cls(before, between, places[-1], types)

    def head(self, question: np.ndarray) -> np.ndarray:
        """Ids up to the first sentence; the last of them marks it."""
        return np.concatenate([self.before, question, self.between])

    def window(
        self,
        head: np.ndarray,
        texts: Sequence[np.ndarray],
        numbers: range,
        passage: int,
        longest: int,
    ) -> _Window:
        """A window of some sentences."""
        marker = self.between[-1:]
        parts, position, at = [head], [len(head) - 1], len(head)
        for number in numbers:
            if number != numbers[0]:
                parts.append(marker)
                position.append(at)
                at += 1
            text = texts[number][: longest - 1 - at]
            parts.append(text)
            at += len(text)
        ids = np.concatenate([*parts, [self.after]]).astype(np.int32)
        types = np.full(len(ids), self.types[1], np.int32)
        types[: len(head)] = self.types[0]
        return _Window(ids, types, passage, np.array(position), np.array(numbers))


def _joined(made: Sequence[_Window]) -> Windows:
    lengths = np.array([len(window.token_ids) for window in made], np.int32)
    marks = [len(window.position) for window in made]
    return Windows(
        Sequences(
            np.concatenate([window.token_ids for window in made]),
            np.concatenate([window.token_types for window in made]),
            lengths,
        ),
        np.array([window.passage for window in made]),
        np.repeat(np.arange(len(made)), marks),
        np.concatenate([window.position for window in made]),
        np.concatenate([window.sentence for window in made]),
    )

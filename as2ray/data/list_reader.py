"""Reads examples that are questions, each with a list of positive and negative candidates."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from as2ray.data.list_sampler import ListSampler
from as2ray.data.packed_dataset import EncodedExamples
from as2ray.data.pair_reader import PairReader
from as2ray.tables.schema import LIST_INDEX


@dataclass(frozen=True)
class ListReader:
    """Samples a list of candidates for every question that has both labels."""

    pairs: PairReader
    """Reads the candidates as pairs."""
    max_sequences: int = 2
    """Maximum number of candidates of a list."""

    @cached_property
    def sampler(self) -> ListSampler:
        """Samples rows of the questions that have both labels."""
        return ListSampler.from_files(self.pairs.files.paths)

    @property
    def num_examples(self) -> int:
        """Number of questions that have both labels."""
        return len(self.sampler)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a list."""
        return self.max_sequences * self.pairs.max_tokens

    def sample_rows(self, examples: np.ndarray, seed: list[int]) -> np.ndarray:
        """Samples the rows of each question's list, shape [questions, max_sequences].

        A shorter list is padded with -1.
        """
        return self.sampler.sample(examples, self.max_sequences, np.random.default_rng([*seed, 1]))

    def encode(self, rows: np.ndarray) -> EncodedExamples:
        """Reads and tokenizes lists, in order."""
        is_row = rows >= 0
        encoded = self.pairs.encode(rows[is_row])
        columns = {**encoded.columns, LIST_INDEX: np.nonzero(is_row)[0]}
        return replace(encoded, columns=columns, num_sequences=is_row.sum(1))

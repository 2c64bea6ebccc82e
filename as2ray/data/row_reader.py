"""Base of the readers whose examples are rows of Parquet files."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from as2ray.tables.parquet import ParquetTable
from as2ray.text.tokenization import PairTokenizer


@dataclass(frozen=True)
class RowReader:
    """Reads examples that are rows of Parquet files; subclasses have a method `encode`."""

    max_sequences: ClassVar[int] = 1

    files: ParquetTable
    tokenizer: PairTokenizer

    @property
    def num_examples(self) -> int:
        """Number of rows."""
        return len(self.files)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a pair, or of a window of a passage."""
        return self.tokenizer.max_length

    def sample_rows(self, examples: np.ndarray, seed: list[int]) -> np.ndarray:
        """Returns the examples: each is a row."""
        return examples

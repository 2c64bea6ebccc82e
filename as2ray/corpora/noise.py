"""Wrong labels on purpose: how a ranker bears noise (TANDA, Table 5).

Knows the candidates table. Must not know any corpus or file.
"""

import numpy as np
import pyarrow as pa

from as2ray.corpora.tables import put
from as2ray.errors import CorpusError


def flip_labels(table: pa.Table, fraction: float, seed: int) -> pa.Table:
    """The table with exactly `int(fraction * rows)` labels turned over, drawn without return.

    A tenth and a fifth of WikiQA's 8,672 training pairs are the paper's 867 and 1,734. Grades,
    where the table has them, stay as they were.

    Raises:
        CorpusError: A fraction outside 0 to 1.
    """
    if not 0 <= fraction <= 1:
        raise CorpusError(
            f"fraction {fraction}", expected="a number from 0 to 1", mend="0.1 flips a tenth"
        )
    labels = table["label"].to_numpy().copy()
    rng = np.random.default_rng(seed)
    flipped = rng.choice(len(labels), int(fraction * len(labels)), replace=False)
    labels[flipped] = 1 - labels[flipped]
    return put(table, "label", pa.array(labels, pa.int8()))

"""How the scores of several heads become one.

Knows its names alone. Must not know torch: a job tells it before any model is loaded.
"""

from typing import Literal

Average = Literal["probabilities", "logits"]
"""What of the heads is averaged into one score: the released model's choice, or the other."""

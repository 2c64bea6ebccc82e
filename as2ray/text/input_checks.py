"""Checks of the questions and candidates that a user passes in."""

import re
from numbers import Integral

from as2ray.errors import ConfigError, EvaluationError

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair. JSON and file names may contain one; it is invalid in UTF-8."""


def check_text(text: object) -> None:
    """Checks that a question or candidate can be tokenized.

    Raises:
        EvaluationError: The value is not a string, is blank, or contains a `SURROGATE`.
    """
    if not isinstance(text, str) or not text.strip() or SURROGATE.search(text):
        raise EvaluationError(
            f"an empty or non-text question or candidate, or invalid Unicode: {text!r:.200}"
        )


def check_top_k(top_k: object, name: str = "top_k") -> None:
    """Checks that at least one result is requested; None requests all.

    Raises:
        ConfigError: It is below 1, or no integer; it has this name.
    """
    if top_k is None:
        return
    if isinstance(top_k, bool) or not isinstance(top_k, Integral) or int(top_k) < 1:
        raise ConfigError(f"{name}={top_k!r} must be an integer, and at least 1")

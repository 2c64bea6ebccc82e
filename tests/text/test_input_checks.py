import numpy as np
import pytest

from as2ray.errors import ConfigError, EvaluationError
from as2ray.text.input_checks import check_text, check_top_k


@pytest.mark.parametrize("text", ["", " \n", None, 3, ["a"], "half \ud800"])
def test_text_that_no_tokenizer_reads_is_refused(text):
    with pytest.raises(EvaluationError, match="empty or non-text"):
        check_text(text)


@pytest.mark.parametrize("top_k", [0, -1, 2.5, "3"])
def test_top_k_below_one_or_that_is_no_integer_is_refused(top_k):
    with pytest.raises(ConfigError, match=f"top_k={top_k!r} must be an integer, and at least 1"):
        check_top_k(top_k)


def test_text_and_top_k_that_can_be_ranked_are_accepted():
    check_text("𝄞 whole")
    check_top_k(1)
    check_top_k(np.int64(2))
    check_top_k(None)

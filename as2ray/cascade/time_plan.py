"""Plans how many candidates pass each exit within a time budget."""

from typing import Final

import numpy as np

MIN_KEEP_RATIO: Final = 0.3
"""Share of the candidates that pass each exit at least, as long as they are scored. If there is no
time for as many, fewer of the given candidates are scored at all."""

NOT_SCORED: Final = -1
"""Stage of candidates for which there was no time."""


def num_affordable(
    num_done: int, stage_s: np.ndarray, time_left_s: float, keep_ratios: np.ndarray | None = None
) -> int:
    """Returns how many more candidates a stage can score, so that there is time for the later ones.

    Args:
        num_done: Candidates that this stage has scored.
        stage_s: Expected seconds of this stage and of each later one for a candidate, shape
            [stages].
        time_left_s: Seconds until the deadline.
        keep_ratios: Share of the candidates that each stage is expected to pass to the next one,
            shape [stages - 1]; those below `MIN_KEEP_RATIO`, and the default, are this ratio.
    """
    if keep_ratios is None:
        keep_ratios = np.zeros(len(stage_s) - 1)
    later_s = float(stage_s[1:] @ np.cumprod(np.maximum(keep_ratios, MIN_KEEP_RATIO)))
    return max(0, int((time_left_s - num_done * later_s) / (stage_s[0] + later_s)))


def find_keep_ratio(num_candidates: int, later_s: np.ndarray, time_left_s: float) -> float:
    """Returns the share of the candidates that each exit can keep in the time that is left.

    Args:
        num_candidates: Candidates of the stage before.
        later_s: Expected seconds of each stage to come for a candidate, shape [stages].
        time_left_s: Seconds until the deadline.
    """
    low, high = 0.0, 1.0
    if num_candidates * later_s.sum() <= time_left_s:
        return 1.0
    for _ in range(20):
        ratio = (low + high) / 2
        duration_s = num_candidates * later_s @ ratio ** np.arange(1, len(later_s) + 1)
        low, high = (ratio, high) if duration_s <= time_left_s else (low, ratio)
    return low

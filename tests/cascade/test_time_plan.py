import numpy as np
import pytest

from as2ray.cascade.time_plan import find_keep_ratio, num_affordable


def test_plan_uses_the_time_that_is_left():
    stage_s = np.array([1.0, 2.0, 4.0])
    later_s = 0.3 * 2 + 0.09 * 4
    assert num_affordable(0, stage_s, 100.0) == int(100 / (1 + later_s))
    assert num_affordable(10, stage_s, 100.0) == int((100 - 10 * later_s) / (1 + later_s))
    assert num_affordable(10, stage_s, 1.0) == 0
    later_s = 0.5 * 2 + 0.5 * 0.3 * 4  # no less than the smallest ratio
    assert num_affordable(0, stage_s, 100.0, np.array([0.5, 0.1])) == int(100 / (1 + later_s))
    assert find_keep_ratio(10, stage_s[1:], 60.0) == 1.0
    ratio = find_keep_ratio(10, stage_s[1:], 20.0)
    assert 10 * (ratio * 2 + ratio**2 * 4) == pytest.approx(20.0, rel=1e-4)
    assert find_keep_ratio(10, stage_s[1:], 0.0) == 0.0
    assert find_keep_ratio(10, stage_s[1:], 59.9) == pytest.approx(1.0, abs=0.01)

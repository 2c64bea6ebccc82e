import pytest

from as2ray.profiling.speed_ratio import SpeedRatio, measure_alternately


def test_alternate_takes_turns_after_warming_each_side_up():
    turns = []

    def side(name: str, rates: list[float]):
        def measure() -> float:
            turns.append(name)
            return rates.pop(0)

        return measure

    ours = side("ours", [999.0, 10.0, 30.0, 12.0])
    others = [side("slow", [1.0, 5.0, 10.0, 3.0]), side("fast", [1.0, 20.0, 20.0, 24.0])]
    slow, fast = measure_alternately(ours, others, num_repeats=3)
    once = ["ours", "slow", "fast"]
    assert turns == [*once, *once, *once[::-1], *once]
    assert slow == SpeedRatio((10.0, 30.0, 12.0), (5.0, 10.0, 3.0))
    assert slow.ratios == (2.0, 3.0, 4.0)
    assert fast.ratios == (0.5, 1.5, 0.5)


def test_sides_measured_once_are_not_warmed_up():
    rates = {"ours": [10.0], "theirs": [5.0]}
    (ratio,) = measure_alternately(rates["ours"].pop, [rates["theirs"].pop], num_repeats=1)
    assert ratio.ratios == (2.0,)


def test_ratio_is_the_median_with_lowest_and_highest():
    ratio = SpeedRatio((10.0, 30.0, 12.0), (5.0, 10.0, 3.0))
    assert ratio.median == 3.0
    assert ratio.range == (2.0, 4.0)
    assert str(ratio) == "3.00 (2.00..4.00)"
    assert ratio.as_json()["ratio"] == {"median": 3.0, "min": 2.0, "max": 4.0}


def test_ratio_of_unequal_repeats_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        _ = SpeedRatio((1.0, 2.0), (1.0,)).ratios

import pytest
import tiny

from as2ray.models import quantization

TABLE = tiny.with_distinct_questions(tiny.candidates(500, each=5))


@pytest.mark.parametrize(("num_rows", "num_fitting"), [(199, 199), (200, 100), (2_500, 2_000)])
def test_ranges_are_checked_on_other_pairs_than_they_are_fitted_on(
    monkeypatch, num_rows, num_fitting
):
    pairs = []
    for name in ("_fit", "_keep_sensitive_parts"):
        monkeypatch.setattr(quantization, name, lambda _, *texts: pairs.append({*zip(*texts)}))
    monkeypatch.setattr(quantization, "has_int8", lambda _: True)
    ranker = type("Ranker", (), {"device": "cpu"})()
    table = TABLE.slice(0, num_rows)
    assert quantization.fit_activation_ranges(ranker, table) == num_fitting
    fitting, others = pairs
    assert (len(fitting), len(others)) == (num_fitting, 100)
    assert fitting.isdisjoint(others) == (num_rows >= 200)

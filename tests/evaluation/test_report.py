import json

import numpy as np
import pytest

from as2ray.errors import EvaluationError
from as2ray.evaluation.measures import evaluate
from as2ray.evaluation.report import build_report, save_report, to_markdown, to_summary


@pytest.fixture
def table(make_table):
    return make_table([[1, 0, 0, 0]] * 30)


@pytest.fixture
def systems(table):
    labels = table["label"].to_numpy()
    noise = np.random.default_rng(0).normal(size=(3, table.num_rows))

    def at(weight, seed):
        return evaluate(
            table, weight * labels + noise[seed], ["AP", "P@1"], question_filter="clean"
        )

    return {"BM25": {0: at(0, 0)}, "TANDA": {s: at(3, s) for s in range(3)}, "same": {0: at(0, 0)}}


def test_report_carries_filter_fingerprint_seeds_and_tests(systems):
    made = build_report("Toy", systems, baseline="BM25", published_results={"paper": {"AP": 0.92}})
    text = to_markdown(made)
    assert made.fingerprint in text
    assert "30 questions / 120 pairs / 30 positives under the filter `clean`" in text
    assert "| BM25 (baseline) | 0 |" in text
    assert "| TANDA | 0, 1, 2 |" in text
    assert "| *paper, as printed* |  | 0.9200 |  |" in text
    assert text.startswith("### Toy\n\n| system | seeds | AP | P@1 |\n| --- | --- | --- | --- |\n")
    tests = "| system | measure | difference | interval | effect | p | Holm | t | Wilcoxon |"
    assert f"\n\n{tests} Spearman |\n" in text
    assert text.endswith("of the differences.\n")
    assert "adjusted over 4 tests" in text
    footer = text.splitlines()[-1]
    assert "Mean ± standard deviation over seeds. Tests against BM25" in footer
    assert "; table `" in footer.split(". Mean")[0]
    assert "Mean ±" not in to_markdown(
        build_report("Toy", {"BM25": systems["BM25"]}, baseline="BM25")
    )
    for row, line in zip(made.rows, text.splitlines()[4:6]):
        values = [cell.strip(" †") for cell in line.split("|")[3:-1]]
        assert values == [
            f"{value.mean:.4f}" + (f" ± {value.std:.4f}" if value.std else "")
            for value in row.measures.values()
        ]
    two = {**systems, "TANDA": {seed: systems["TANDA"][seed] for seed in range(2)}}
    assert "Mean ±" in to_markdown(build_report("Toy", two, baseline="BM25"))
    assert [row.measures["AP"].num_seeds for row in made.rows] == [1, 3, 1, 1]


def test_summary_has_the_best_system_its_baselines_and_the_file_with_the_rest(systems):
    many = {**systems, **{f"other {n}": systems["same"] for n in range(3)}}
    published = {"paper, all": {"AP": 0.6}, "paper, other": {"AP": 0.1}}
    made = build_report(
        "Toy",
        many,
        baseline="BM25",
        published_results=published,
        reproduces={"TANDA": "paper, all", "other 1": "paper, other"},
    )
    text = to_summary(made, "out/toy.md", keep=["same"])
    listed = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert listed[2:] == ["| BM25 (baseline)", "| TANDA", "| same", "| *paper, all, as printed*"]
    test = made.rows[1].comparisons["AP"]
    assert f"TANDA: AP {test.difference:+.4f} [{test.interval[0]:+.4f}, " in text
    assert text.endswith("(Holm). 4 more systems, the tests: out/toy.md\n")
    quality = made.rows[0].measures
    assert f"| BM25 (baseline) | {quality['AP'].mean:.4f} | {quality['P@1'].mean:.4f} |" in text
    assert "other 1: AP" in to_summary(made, "out/toy.md", best="other 1")
    assert to_summary(made, "out/toy.md", best="not complete", keep=["same"]) == text


def test_summary_of_few_systems_has_all(systems):
    five = {**systems, "other 1": systems["same"], "other 2": systems["same"]}
    text = to_summary(build_report("Toy", five, baseline="BM25"), "out/toy.md", best="BM25")
    assert all(f"| {system}" in text for system in five)
    assert text.endswith("|\n\nThe tests: out/toy.md\n")
    assert text.startswith("### Toy\n\n| system | AP | P@1 |\n| --- | --- | --- |\n| BM25 (base")
    with_paper = build_report(
        "Toy", five, baseline="BM25", published_results={"paper": {"RR": 0.5}}
    )
    assert "| system | AP | P@1 |" in to_summary(with_paper, "out/toy.md")


def test_best_system_has_the_highest_first_measure(table):
    last = np.array([0.0, 3.0, 2.0, 1.0] * 30)
    higher_ap = np.array([2.0, 3.0, 1.0, 0.0] * 30)  # every answer second
    higher_p = np.array([3.0, 2.0, 1.0, 0.0] * 9 + [0.0, 3.0, 2.0, 1.0] * 21)
    systems = {
        name: {0: evaluate(table, scores, ["AP", "P@1"])}
        for name, scores in {"BM25": last, "first": higher_p, "second": higher_ap}.items()
    }
    made = build_report("Toy", systems, baseline="BM25")
    assert made.rows[1].measures["P@1"].mean > made.rows[2].measures["P@1"].mean
    assert "\nsecond: AP +" in to_summary(made, "out/toy.md")


def test_tests_are_drawn_with_the_seed_of_the_report(systems):
    few = {"BM25": systems["BM25"], "TANDA": systems["TANDA"]}
    tests = [
        build_report("Toy", few, baseline="BM25", **options).rows[1].comparisons["AP"].interval
        for options in ({}, {"seed": 0}, {"seed": 1})
    ]
    assert tests[0] == tests[1] != tests[2]


def test_only_significant_systems_bear_the_mark(systems):
    rows = {row.system: row for row in build_report("Toy", systems, baseline="BM25").rows}
    lines = to_markdown(build_report("Toy", systems, baseline="BM25")).splitlines()
    marked = {line.split(" | ")[0].strip("| ") for line in lines if " † |" in line}
    assert marked == {"TANDA"}
    assert rows["TANDA"].p_holm["AP"] < 0.05
    assert rows["same"].p_holm == {"AP": 1.0, "P@1": 1.0}
    assert rows["TANDA"].measures["AP"].std > 0
    assert not rows["BM25"].comparisons


def test_saved_json_says_the_same(systems, tmp_path):
    made = build_report("Toy", systems, baseline="BM25")
    save_report(made, tmp_path / "results.md")
    content = json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "results.md").read_text() == to_markdown(made)
    assert content["fingerprint"] == made.fingerprint
    assert content["rows"][1]["seeds"] == [0, 1, 2]
    assert content["rows"][1]["measures"]["AP"]["mean"] == made.rows[1].measures["AP"].mean


def test_bar_in_a_name_stays_inside_its_cell(systems):
    text = to_markdown(build_report("Toy", {"a|b": systems["BM25"]}, baseline="a|b"))
    assert r"a\|b (baseline)" in text


def test_evaluations_of_other_kinds_are_not_put_side_by_side(systems, table):
    other = evaluate(table, np.zeros(table.num_rows), ["AP", "P@1"], question_filter="raw")
    with pytest.raises(EvaluationError, match=r"differ in .* filter.*'clean'.*'raw'"):
        build_report("Toy", {**systems, "other": {0: other}}, baseline="BM25")
    with pytest.raises(EvaluationError, match="baseline 'BM26'"):
        build_report("Toy", systems, baseline="BM26")


def test_report_has_a_column_of_parameters_where_they_are_known(systems):
    made = build_report("Toy", systems, baseline="BM25", parameters={"TANDA": 124_800_000})
    lines = to_markdown(made).splitlines()
    assert lines[2].endswith("| parameters |")
    assert [line.split("|")[-2].strip() for line in lines[4:7]] == ["", "124.8M", ""]
    assert "parameters" not in to_markdown(build_report("Toy", systems, baseline="BM25"))
    made = build_report(
        "Toy",
        systems,
        baseline="BM25",
        parameters={"TANDA": 124_800_000},
        published_results={"paper": {"AP": 0.6, "parameters": 124e6}},
        reproduces={"TANDA": "paper"},
    )
    text = to_markdown(made)
    assert "| *paper, as printed* |  | 0.6000 |  | 124.0M |" in text
    assert "| system | measure | difference |" in text
    assert "| system | measure | published | ours | difference | claim |" in text
    assert "| TANDA | parameters | 124.0M | 124.8M | +0.8M |  |" in text
    large = build_report(
        "Toy",
        systems,
        baseline="BM25",
        parameters={"TANDA": 13_015_000_000},
        published_results={"paper": {"parameters": 1e6}},
        reproduces={"TANDA": "paper", "same": "paper", "absent": "paper", "BM25": "absent"},
    )
    cells = to_markdown(large).split("Beside the paper")[1]
    assert [line for line in cells.splitlines() if "parameters" in line] == [
        "| TANDA | parameters | 1.0M | 13015.0M | +13014.0M |  |"
    ]


def test_cells_of_a_paper_stand_beside_ours_with_their_claims(systems):
    published = {"paper, none": {"AP": 0.5, "RR": 0.9}, "paper, all": {"AP": 0.6, "P@1": 0.1}}
    reproduces = {"BM25": "paper, none", "TANDA": "paper, all", "same": "paper, none"}
    made = build_report(
        "Toy", systems, baseline="BM25", published_results=published, reproduces=reproduces
    )
    lines = to_markdown(made).split("Beside the paper")[1].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    ours = {row.system: row.measures["AP"].mean for row in made.rows[:3]}
    assert [row[:3] + row[5:] for row in cells[2:]] == [
        ["BM25", "AP", "0.5000", ""],
        ["TANDA", "AP", "0.6000", "holds"],
        ["TANDA", "P@1", "0.1000", ""],  # of which the paper has no baseline
        ["same", "AP", "0.5000", "holds"],
    ]
    assert cells[3][3:5] == [f"{ours['TANDA']:.4f}", f"{ours['TANDA'] - 0.6:+.4f}"]
    published["paper, all"]["AP"] = 0.4
    made = build_report(
        "Toy", systems, baseline="BM25", published_results=published, reproduces=reproduces
    )
    assert "| does not hold |" in to_markdown(made)
    assert "Beside the paper" not in to_markdown(build_report("Toy", systems, baseline="BM25"))

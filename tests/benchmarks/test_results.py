import json
import re
import shutil

import pytest

from benchmarks.results import (
    DATA,
    DRAWN,
    FOLDER,
    PAGE,
    SOURCE,
    STORED,
    build_page,
    fill_tables,
    list_pages,
    main,
)

CLAIMS = ("the paper's claim", "paper", "question")
"""First columns of summaries: their figures are those of drawn tables and of the text below."""

NOT_MEASURED = ("flag", "corpus", "path", "promise")
"""First columns of tables whose numbers are settings, limits, or sizes of public data."""

NUMBER = re.compile(r"(?<![\w./-])\d(?:[\d,]*\d)?(?:\.\d+)?(?: ?%)?")


def typed_tables(page: str) -> list[list[str]]:
    """Returns the lines of the tables of a page that no file draws."""
    page = re.sub(r"```.*?```", "", DRAWN.sub("", page), flags=re.DOTALL)
    return [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)]


def list_figures(text: str) -> list[str]:
    """Returns the numbers of a text that look measured: decimals, thousands and shares."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", "", text)
    return [number for number in NUMBER.findall(text) if set(number) & {".", ",", "%"}]


def is_stated(figure: str, text: str) -> bool:
    """Whether a text has a number that rounds to a figure; 63 % is also 0.63."""
    value = float(figure.rstrip(" %").replace(",", ""))
    tolerance = 0.5001 * 10 ** -len(figure.rstrip(" %").partition(".")[2])
    numbers = [float(x.replace(",", "")) for x in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]
    numbers += [100 * number for number in numbers if "%" in figure]
    return any(abs(number - value) <= tolerance for number in numbers)


def test_page_of_results_is_what_its_files_give():
    assert (FOLDER / PAGE).read_text(encoding="utf-8") == build_page(FOLDER / DATA)


@pytest.mark.parametrize("path", list_pages(), ids=lambda path: path.stem)
def test_tables_of_a_page_are_what_their_files_give(path):
    page = path.read_text(encoding="utf-8")
    assert fill_tables(page, FOLDER / DATA) == page
    assert page.count("<!-- drawn from ") == len(DRAWN.findall(page))


@pytest.mark.parametrize("path", list_pages(), ids=lambda path: path.stem)
def test_page_shows_each_picture_once(path):
    pictures = re.findall(r"!\[.*?\]\((.+?)\)", path.read_text(encoding="utf-8"))
    assert len(pictures) == len(set(pictures))


@pytest.mark.parametrize("path", list_pages(), ids=lambda path: path.stem)
def test_tables_with_measured_numbers_are_drawn(path):
    if path == FOLDER / PAGE:
        return  # the whole page is drawn
    for table in typed_tables(path.read_text(encoding="utf-8")):
        first = table[0].split("|")[1].strip()
        if first not in (*CLAIMS, *NOT_MEASURED):
            assert not list_figures("\n".join(table)), table[0]


@pytest.mark.parametrize("path", list_pages(), ids=lambda path: path.stem)
def test_figures_of_a_summary_stand_in_the_pages_that_it_sums_up(path):
    page = path.read_text(encoding="utf-8")
    for table in typed_tables(page):
        if table[0].split("|")[1].strip() not in CLAIMS:
            continue
        below = page.partition(table[-1])[2]
        for row in table[2:]:
            linked = [path.parent / link for link in re.findall(r"\]\(([\w/.]+\.md)", row)]
            text = below + "".join(page.read_text(encoding="utf-8") for page in linked)
            missing = [figure for figure in list_figures(row) if not is_stated(figure, text)]
            assert not missing, row


def test_typed_tables_are_those_outside_markers_and_code():
    page = "| a |\n|---|\n| 0.5 |\n\n<!-- drawn from x.json -->\n| b |\n<!-- end -->\n"
    assert typed_tables(page + "```\n| c |\n```\n") == [["| a |", "|---|", "| 0.5 |"]]
    text = "0.25 against 1,200, 44 %, but 3 seeds, `x 0.5`, bert-1.5, 2026-11-26, v3.1"
    assert list_figures(text) == ["0.25", "1,200", "44 %"]
    assert is_stated("0.7", "MAP 0.6500")
    assert is_stated("44 %", "P@1 0.4385")
    assert not is_stated("0.70", "MAP 0.65, 1,070")


def test_stored_tables_are_rectangular_say_where_they_come_from_and_are_drawn():
    pages = "".join(path.read_text(encoding="utf-8") for path in list_pages())
    for path in (FOLDER / DATA / STORED).rglob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        assert content.keys() - {"plot"} == {*SOURCE, "columns", "rows"}, path
        assert {len(row) for row in content["rows"]} == {len(content["columns"])}, path
        assert f"<!-- drawn from {path.relative_to(FOLDER / DATA)} -->" in pages
        if "plot" in content:
            name = f"{path.parent.name}-{path.stem}.png"
            assert f"/{name})" in pages
            assert (FOLDER / name).is_file()


def test_cell_of_several_seeds_is_their_mean_and_deviation_with_its_mark(tmp_path):
    table = {"columns": ["system", "MAP"], "rows": [["a", [0.5, 0.7, "†"]], ["b", "0.1"]]}
    (tmp_path / "x.json").write_text(json.dumps(table))
    page = fill_tables("<!-- drawn from x.json -->\n<!-- end -->\n", tmp_path)
    assert "| a | 0.600 ± 0.141 † |\n| b | 0.1 |" in page


def test_table_of_a_report_marks_the_baseline_and_what_differs_from_it(tmp_path):
    report = json.loads((FOLDER / DATA / "answer_scores" / "squad.json").read_text())
    report["rows"][0]["measures"]["AP"] = {"mean": 0.25, "std": 0.125, "num_seeds": 2}
    (tmp_path / "x.json").write_text(json.dumps(report))
    page = fill_tables("<!-- drawn from x.json -->\n<!-- end -->\n", tmp_path)
    assert "| system | MAP | MRR | P@1 |" in page
    assert "| BM25 | 0.2500 ± 0.1250 | 0.8810 | 0.8300 |" in page
    assert "| cosine (untrained) (baseline) | 0.8789 | 0.8873 | 0.8367 |" in page
    assert "| ranker, zero-shot | 0.3893 † | 0.3906 † | 0.2167 † |" in page


def test_table_of_a_plan_has_the_hours_of_each_paper(tmp_path):
    content = json.loads((FOLDER / DATA / "plan.json").read_text())
    content["results"]["papers"]["TANDA"]["hours"]["8"]["side by side"] = 1.25
    (tmp_path / "plan.json").write_text(json.dumps(content))
    page = fill_tables("<!-- drawn from plan.json -->\n<!-- end -->\n", tmp_path)
    assert "| TANDA | 207 (207) | 421.0 | 420.4 / 1.2 (1) | 420.3 / 13.1 (1) |" in page


def test_table_of_a_page_follows_its_file(tmp_path):
    content = json.loads((FOLDER / DATA / "gpu.json").read_text())
    content["results"]["MiniLM"]["pairs a second"]["rates"] = [12_345.0]
    (tmp_path / "gpu.json").write_text(json.dumps(content))
    page = fill_tables("a\n\n<!-- drawn from gpu.json -->\nold\n<!-- end -->\n\nz\n", tmp_path)
    assert "| MiniLM | 12,345 | 2.54 (2.33 to 2.64) | 38 % | 2.01 ms |" in page
    assert "old" not in page
    assert page.endswith("<!-- end -->\n\nz\n")


def test_table_of_budgets_has_a_row_for_each_and_follows_its_file(tmp_path):
    content = json.loads((FOLDER / DATA / "budget.json").read_text())
    content["results"]["25 ms"]["cascade"] = {"MAP": 0.5, "p50": 1.0, "p99": 1_234.0}
    (tmp_path / "budget.json").write_text(json.dumps(content))
    page = fill_tables("<!-- drawn from budget.json -->\n<!-- end -->\n", tmp_path)
    rows = [line for line in page.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == [
        *("| 25 ms", "| 50 ms", "| 100 ms", "| 200 ms", "| 500 ms", "| none")
    ]
    assert rows[0].startswith("| 25 ms | 1 ms | 1,234 ms | 0.500 |")


def test_table_of_a_search_has_its_steps_answers_and_peers(tmp_path):
    content = json.loads((FOLDER / DATA / "retrieval.json").read_text())
    content["results"]["1,000,000"]["ask"]["systems"]["fitted"]["hit@3"] = 0.25
    (tmp_path / "retrieval.json").write_text(json.dumps(content))
    page = fill_tables("<!-- drawn from retrieval.json -->\n<!-- end -->\n", tmp_path)
    assert "| 1,000,000 | ask, fitted | 38.4 | 49.5 | 0.25 | 1.0 |" in page
    assert "| 1,000,000 | dense exact | 94.8 | 109.3 |" in page
    assert "| 1,000,000 | ask of the peers | 1,755.6 | 2,115.4 |" in page


def test_section_of_a_benchmark_names_its_flags_and_what_it_was_run_on(tmp_path):
    content = json.loads((FOLDER / DATA / "ranking-xlm-roberta.json").read_text())
    content["arguments"] = {"cores": 2, "brief": True, "small": False, "family": ["bert", "gte"]}
    (tmp_path / "ranking-two.json").write_text(json.dumps(content))
    page = build_page(tmp_path)
    assert "## benchmarks.ranking (two): CPU" in page
    assert "`python -m benchmarks.ranking --cores 2 --brief --family bert --family gte`" in page


def test_files_of_results_are_small_and_name_no_folder_of_a_machine():
    for path in (FOLDER / DATA).rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert len(text) < 100_000
        assert not any(folder in text for folder in ("/tmp/", "/home/", "/root/", "/work/"))


def test_plots_and_page_are_made_from_the_files_of_a_folder(tmp_path):
    fewer = shutil.ignore_patterns("budget-http.json", "cerberus", "two_in_one")
    shutil.copytree(FOLDER / DATA, tmp_path / DATA, ignore=fewer)
    gpu = json.loads((tmp_path / DATA / "gpu.json").read_text())
    gpu["claims"][0]["measured"] = "7 pairs/s"
    gpu["machine"]["gpu"] = "Abacus"
    (tmp_path / DATA / "gpu.json").write_text(json.dumps(gpu))
    budget = json.loads((tmp_path / DATA / "budget.json").read_text())
    budget["results"]["cosine"] = budget["results"]["25 ms"]["cascade"]
    (tmp_path / DATA / "budget.json").write_text(json.dumps(budget))
    main(["--folder", str(tmp_path)])
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert "## benchmarks.gpu: Abacus" in page
    assert "| MiniLM, packed | 7 pairs/s |" in page
    for name in ("budget.png", "gpu.png", "bound-monolith.png", "bound-monolith-longer.png"):
        assert f"]({name})" in page
        assert (tmp_path / name).stat().st_size > 5_000
        assert (FOLDER / name).is_file()
    for name in ("tanda-wikiqa.png", "bm25_transfer-wikiqa.png"):
        assert (tmp_path / name).stat().st_size > 5_000
    plot = (tmp_path / "budget.png").read_bytes()
    assert plot != (FOLDER / "budget.png").read_bytes()  # it has the cosine


def test_section_of_a_recipe_says_when_and_where_it_ran(tmp_path):
    shutil.copytree(FOLDER / DATA / "cascade_bounds", tmp_path / "cascade_bounds")
    machine = {"system": "Linux", "cores": 4, "python": "3.12.1", "gpu": None}
    packages = {"torch": "2.11.0", "transformers": "5.17.0"}
    run = {"title": "Bounds", "created_at": "2026-11-26T10:00:00+00:00", "commit": "abc"}
    run |= {"machine": machine, "packages": packages, "seeds": [0, 1, 2]}
    (tmp_path / "cascade_bounds" / "run.json").write_text(json.dumps(run))
    heading = "Bounds; 2026-11-26, commit abc, Linux, 4 cores, Python 3.12.1, torch 2.11.0"
    assert heading in build_page(tmp_path)

import json
import shutil

import pytest

from benchmarks.results import DATA, DRAWN, FOLDER, PAGE, PAPERS, build_page, fill_tables, main


def test_page_of_results_is_what_its_files_give():
    assert (FOLDER / PAGE).read_text(encoding="utf-8") == build_page(FOLDER / DATA)


@pytest.mark.parametrize("path", [*PAPERS.glob("*.md"), *FOLDER.glob("*.md")], ids=lambda p: p.stem)
def test_tables_of_a_page_are_what_their_files_give(path):
    page = path.read_text(encoding="utf-8")
    assert fill_tables(page, FOLDER / DATA) == page
    assert page.count("<!-- drawn from ") == len(DRAWN.findall(page))


def test_table_of_a_page_follows_its_file(tmp_path):
    content = json.loads((FOLDER / DATA / "gpu.json").read_text())
    content["results"]["MiniLM"]["pairs a second"]["rates"] = [12_345.0]
    (tmp_path / "gpu.json").write_text(json.dumps(content))
    page = fill_tables("a\n\n<!-- drawn from gpu.json -->\nold\n<!-- end -->\n\nz\n", tmp_path)
    assert "| MiniLM | 12,345 | 2.52 (2.35 to 2.56) | 37 % | 1.86 ms |" in page
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
    shutil.copytree(FOLDER / DATA, tmp_path / DATA)
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
    plot = (tmp_path / "budget.png").read_bytes()
    assert plot != (FOLDER / "budget.png").read_bytes()  # it has the cosine


@pytest.mark.parametrize("has_run", [False, True])
def test_section_of_a_recipe_says_when_and_where_it_ran_if_that_is_stored(tmp_path, has_run):
    shutil.copytree(FOLDER / DATA / "cascade_bounds", tmp_path / "cascade_bounds")
    machine = {"system": "Linux", "cores": 4, "python": "3.12.1", "gpu": None}
    packages = {"torch": "2.11.0", "transformers": "5.17.0"}
    run = {"title": "Bounds", "created_at": "2026-11-26T10:00:00+00:00", "commit": "abc"}
    run |= {"machine": machine, "packages": packages, "seeds": [0, 1, 2]}
    if has_run:
        (tmp_path / "cascade_bounds" / "run.json").write_text(json.dumps(run))
    heading = "Bounds; 2026-11-26, commit abc, Linux, 4 cores, Python 3.12.1, torch 2.11.0"
    assert (heading in build_page(tmp_path)) is has_run
    assert ("before recipes stored" in build_page(tmp_path)) is not has_run

from as2ray.corpora.verification import data_root, list_corpora, verify_releases
from as2ray.corpora.wikiqa import PUBLISHED_COUNTS


def test_verify_all_in_an_empty_root_is_nothing(tmp_path):
    assert verify_releases(tmp_path) == []


def test_verify_all_reports_other_counts_without_raising(wikiqa, tmp_path):
    checks = verify_releases(tmp_path)
    assert len(checks) == 9
    assert not any(check.is_ok for check in checks)
    assert {check.actual.num_pairs for check in checks} == {2, 3, 4}
    assert {check.published for check in checks} == {c.counts for c in PUBLISHED_COUNTS}


def test_verify_all_reports_a_damaged_file_and_goes_on(wikiqa, tmp_path):
    path = wikiqa / "WikiQA-dev.tsv"
    path.write_text(path.read_text()[:-12])
    damaged = [check for check in verify_releases(tmp_path) if check.actual is None]
    assert {check.split for check in damaged} == {"dev"}
    assert all("Expected 7 columns" in check.error for check in damaged)


def test_verify_all_reports_a_damaged_inventory(squad, tmp_path):
    (squad / "dev-v1.1.json").write_text("{")
    (check,) = verify_releases(tmp_path)
    assert not check.is_ok
    assert check[:5] == ("squad", "", "release counts", 0, None)
    assert "dev-v1.1.json" in check.error


def test_verify_all_compares_the_data_root_by_default(wikiqa, tmp_path, monkeypatch):
    monkeypatch.setenv("AS2RAY_DATA", str(tmp_path))
    checks = verify_releases()
    assert checks == verify_releases(str(tmp_path))
    assert {(check.corpus, check.name, check.error) for check in checks} == {
        ("wikiqa", question_filter, "") for question_filter in ("raw", "no_all_negative", "clean")
    }


def test_list_corpora_gives_splits_and_options():
    asnq = next(listing for listing in list_corpora() if listing.name == "asnq")
    assert asnq.splits == ("train", "dev-all", "dev", "test")
    assert asnq.options["negative_grades"] == (1, 2, 3)
    assert (asnq.license[:11], asnq.hub) == ("CC BY-NC-SA", "AmazonScience/asnq")
    assert asnq.description.startswith("Questions of Google's log")


def test_data_root_is_the_variable_or_beside_the_checkout(monkeypatch):
    monkeypatch.setenv("AS2RAY_DATA", "/somewhere")
    assert str(data_root()) == "/somewhere"
    monkeypatch.delenv("AS2RAY_DATA")
    assert data_root().parts == ("..", "shared", "data")

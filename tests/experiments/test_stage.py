"""Stages: complete or absent, made once, refused when their inputs changed."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from as2ray.errors import ConfigError, StaleStageError
from as2ray.experiments.stage import digest, manifest, stage


@dataclass(frozen=True)
class Settings:
    rate: float = 0.1
    names: tuple[str, ...] = ("a",)


def _write(part: Path) -> dict[str, int]:
    (part / "made").write_text("x")
    return {"rows": 3}


def test_stage_made_twice_is_made_once(tmp_path):
    calls = []

    def make(part: Path) -> None:
        calls.append(part)

    for _ in range(2):
        stage(tmp_path / "s", {"settings": Settings()}, make)
    assert len(calls) == 1


def test_complete_stage_has_manifest_with_inputs_and_outputs(tmp_path):
    entries = manifest(stage(tmp_path / "s", {"settings": Settings()}, _write))
    assert entries["inputs"] == {"settings": {"rate": 0.1, "names": ["a"]}}
    assert entries["outputs"] == {"rows": 3}
    assert entries["packages"]["pyarrow"]
    assert entries["format_version"] == 2
    assert entries.keys() >= {"created_at", "duration_s", "git_commit"}


def test_stage_with_other_inputs_is_refused_with_the_keys_that_differ(tmp_path):
    stage(tmp_path / "s", {"settings": Settings()}, _write)
    with pytest.raises(StaleStageError, match=r"settings\.rate: 0\.1 -> 0\.5"):
        stage(tmp_path / "s", {"settings": Settings(rate=0.5)}, _write)


def test_stage_that_fails_is_absent_and_gone_on_with(tmp_path):
    def fail(part: Path) -> None:
        (part / "half").write_text("x")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        stage(tmp_path / "s", {"n": 1}, fail)
    assert not (tmp_path / "s").exists()
    seen = []
    stage(tmp_path / "s", {"n": 1}, lambda part: seen.append((part / "half").exists()))
    assert seen == [True]


def test_stage_half_made_from_something_else_is_refused(tmp_path):
    def fail(part: Path) -> None:
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        stage(tmp_path / "s", {"n": 1}, fail)
    with pytest.raises(StaleStageError, match="n: 1 -> 2"):
        stage(tmp_path / "s", {"n": 2}, _write)


def test_digest_depends_on_the_inputs_alone(tmp_path):
    a, b, c = (
        digest(stage(tmp_path / name, {"n": n}, _write))
        for name, n in (("a", 1), ("b", 1), ("c", 2))
    )
    assert a == b != c


def test_stage_refused_before_it_wrote_anything_may_be_asked_for_otherwise(tmp_path):
    def refuse(part):
        raise ConfigError("precision 2; expected at most 1")

    def fail_late(part):
        (part / "half").touch()
        refuse(part)

    with pytest.raises(ConfigError):
        stage(tmp_path / "s", {"precision": 2}, refuse)
    assert stage(tmp_path / "s", {"precision": 1}, lambda part: None).is_dir()
    with pytest.raises(ConfigError):
        stage(tmp_path / "t", {"precision": 2}, fail_late)
    assert (tmp_path / "t.part" / "half").exists()


def test_stage_of_an_older_version_is_refused(tmp_path):
    folder = stage(tmp_path / "s", {"n": 1}, _write)
    entries = manifest(folder)
    del entries["format_version"]
    (folder / "manifest.json").write_text(json.dumps(entries))
    with pytest.raises(StaleStageError, match="format_version None"):
        stage(folder, {"n": 1}, _write)
    (tmp_path / "t.part").mkdir()
    (tmp_path / "t.part" / "identity.json").write_text("{}")
    with pytest.raises(StaleStageError, match=r"no inputs\.json"):
        stage(tmp_path / "t", {"n": 1}, _write)

"""Changes the code in small ways, one at a time, and counts the changes that tests notice.

python tests/mutants.py [FILES]
python tests/mutants.py --sample N [--seed S] [--seconds CPU_SECONDS] [FILES]

Without files: what differs from the last commit, else the files of that commit; with `--sample`,
all files of `PACKAGES`, and of each package N changes drawn at random. Of each package the tests
of its own folder and `RELATED_TESTS` run once on the unchanged code, but for those that start
Ray or processes that train; then each change is tried in a fork of that process, with the tests
that reach the changed function, until one fails; with `--seconds`, with the first of these tests
that take so long together, so that the share can only be too low. A test that fails in a fork of
unchanged code, too, is left out. A change that makes no difference to a user is listed in
`ACCEPTED` with the reason, and does not count. Ends with status 1 if a package is below `GOAL`, or,
with `--sample`, if the total is.

The changes are mutmut's. It does not run them, because it collects the tests and makes their shared
fixtures anew for each.
"""

import argparse
import contextlib
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING

from mutant_run import NOTICED

if TYPE_CHECKING:
    from mutmut.mutation.file_mutation import MutatedFile

GOAL = 0.95
PACKAGES = (
    "cascade",
    "checkpoints",
    "corpora",
    "data",
    "evaluation",
    "experiments",
    "losses",
    "models",
    "retrieval",
    "serving",
    "tables",
    "text",
    "training",
)
"""Packages that compute something; others are not mutated."""

RELATED_TESTS = {
    "checkpoints": (
        "models/encoder/test_int8.py",
        "models/test_calibrated_ranker.py",
        "models/test_ensemble.py",
        "models/test_sequential.py",
    ),
    "corpora": ("cli/test_cli_fetch.py",),
    "experiments": ("cli/test_cli.py", "pipelines", "test_api.py"),
    "models": ("checkpoints/test_sentence_encoder.py",),
    "training": (
        "cli/test_cli_cascade.py",
        "experiments/test_encoder_stages.py",
        "pipelines/test_two_in_one_pipeline.py",
    ),
}
"""Files and folders beside a package's own with tests of its work."""

ACCEPTED = Path("tests/accepted_mutants.toml")
"""Changes that need not be noticed, by file and line."""

ENCODING = re.compile(r'(, )?encoding=(None|"utf-8")|, (?=\))', re.IGNORECASE)
"""The encoding of a file; a change to the default need not be noticed, which is the same here."""

MEMORY_BYTES = 6 * 2**30
"""What a process may allocate: a change can make an array too large for the machine."""

SETTINGS = """
[tool.mutmut]
source_paths = ["as2ray"]
# The wording of errors, descriptions and logs.
do_not_mutate_patterns = [
    '^ *(fix=)?f?".*"[,)]*$', "(fix|problem|message) ?=", "raise .*[Ee]rror",
    "^ *log(ger)?[.]",
    " task[(]", "lookup[(]", "import_object[(]",
    # How a plot or a file looks.
    "indent=2", "(figsize|linewidth|fontsize|alpha|color|zorder|ncols|dpi|markersize|aspect)=",
    "error_style =", "axes.margins",
]
"""


@dataclass(frozen=True)
class Count:
    """Changes of a package: how many there are, were tried, and were noticed."""

    package: str
    total: int
    tried: int
    killed: int

    @property
    def rate(self) -> float:
        """Share of the tried changes that were noticed."""
        return self.killed / max(1, self.tried)

    def __str__(self) -> str:
        from scipy.stats import binomtest

        tried = binomtest(self.killed, max(1, self.tried))
        low, high = tried.proportion_ci(method="wilson")
        return (
            f"{self.package}: {self.killed} of {self.tried} killed "
            f"({self.rate:.1%}, 95 % interval {low:.1%} to {high:.1%}), {self.total} mutants"
        )


def mutate(
    package: str,
    files: list[str],
    folder: Path,
    sample: int | None = None,
    seed: int = 0,
    seconds: float | None = None,
) -> Count:
    """Tries the changes of a package's files, or a sample of them, in a copy of the repository."""
    for name in _git("ls-files", "--cached", "--others", "--exclude-standard"):
        if Path(name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, folder / name)
    with (folder / "pyproject.toml").open("a") as project:
        project.write(SETTINGS)
    with contextlib.chdir(folder):  # mutmut reads its settings there
        from mutmut.configuration import reset_config
        from mutmut.mutation.file_mutation import mutate_file_contents
        from mutmut.utils.format_utils import get_mutant_name

        reset_config()
        mutants, file_of = {}, {}
        for file in files:
            mutated = mutate_file_contents(file, Path(file).read_text())
            Path(file).write_text(mutated.code)
            for name in mutated.mutant_names:
                mutants[get_mutant_name(Path(file), name)] = mutated, name
                file_of[get_mutant_name(Path(file), name)] = file
        chosen = list(mutants) if sample is None else draw(list(mutants), sample, seed)
        status = _run_tests(package, chosen, seconds)
    accepted = read_accepted()
    for name in chosen.copy():
        if status[name] not in NOTICED:
            diff = _diff(*mutants[name])
            old, new = _changed_lines(diff)
            if (file_of[name], old, new) in accepted or ENCODING.sub("", old) == ENCODING.sub(
                "", new
            ):
                chosen.remove(name)
            else:
                sys.stdout.write(f"# {name}: {status[name]}\n{diff}\n")
    killed = sum(status[name] in NOTICED for name in chosen)
    count = Count(package, len(mutants), len(chosen), killed)
    sys.stdout.write(f"{count}\n")
    sys.stdout.flush()
    return count


def draw(names: list[str], sample: int, seed: int) -> list[str]:
    """At most `sample` of the names, drawn at random without replacement."""
    return sorted(random.Random(seed).sample(sorted(names), min(sample, len(names))))


def read_accepted(path: Path = ACCEPTED) -> dict[tuple[str, str, str], str]:
    """Reads the reason of each accepted change, by file, line, and the line that replaces it."""
    entries = tomllib.loads(path.read_text())["mutant"]
    return {(entry["file"], entry["old"], entry["new"]): entry["reason"] for entry in entries}


def weighted_rate(counts: list[Count]) -> float:
    """Estimated share of all packages' changes that are noticed."""
    return sum(c.rate * c.total for c in counts) / max(1, sum(c.total for c in counts))


def changed_files() -> list[str]:
    """Files that differ from the last commit, or else those that it changed."""
    return _git("diff", "--name-only", "HEAD") or _git("diff", "--name-only", "HEAD~1")


def _diff(mutated: "MutatedFile", name: str) -> str:
    """What a change changes."""
    lines, function = mutated.code.splitlines(), name.partition("__mutmut_")[0]
    versions = []
    for version in (f"{function}__mutmut_orig", name):
        span = mutated.line_span_by_function_name[version]
        text = lines[span.start - 1 : span.end]
        versions.append([line.replace(version, plain_name(function)) for line in text])
    return "\n".join([*unified_diff(*versions, lineterm="", n=2)][2:])


def plain_name(function: str) -> str:
    """The name in the code of a function, which mutmut calls `x_name` or `xǁClassǁname`."""
    return function.rpartition("ǁ")[2].removeprefix("x_" if "ǁ" not in function else "")


def _changed_lines(diff: str) -> tuple[str, str]:
    """Returns the old and the new lines of a diff, without the blanks around them."""
    lines = diff.splitlines()
    old, new = ([line[1:].strip() for line in lines if line[:1] == sign] for sign in "-+")
    return " ".join(old), " ".join(new)


def _run_tests(package: str, names: list[str], seconds: float | None) -> dict[str, str]:
    """Tries changes in a process of pytest; what became of each."""
    Path("run.json").write_text(json.dumps({"names": names, "seconds": seconds}))
    Path("status.json").write_text("{}")
    command = [sys.executable, "-m", "pytest", "-p", "mutant_run", "--mutants=run.json"]
    options = ["--hypothesis-profile=mutants", "-p", "no:xdist", "--tb=no"]
    places = ["--rootdir=.", "--basetemp=tmp", "-o", "tmp_path_retention_policy=none"]
    paths = os.pathsep.join(str(Path(path).resolve()) for path in (".", "tests"))
    tests = [f"tests/{name}" for name in (package, *RELATED_TESTS.get(package, ()))]
    ran = subprocess.run(
        [*command, *options, *places, *tests],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES)),
    )
    if ran.returncode:
        sys.exit(f"{ran.stdout}\npytest ended with status {ran.returncode}")
    sys.stdout.write("".join(line for line in ran.stdout.splitlines(True) if "left out" in line))
    return json.loads(Path("status.json").read_text())


def _git(*arguments: str) -> list[str]:
    ran = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True)
    return ran.stdout.splitlines()


def main() -> bool:
    """Runs the command line; whether too few changes were noticed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*")
    parser.add_argument("--sample", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, metavar="S")
    options = parser.parse_args()
    by_package = defaultdict(list)
    names = options.files or (changed_files() if options.sample is None else _git("ls-files"))
    for name in names:
        match Path(name).parts:
            case ("as2ray", package, *_) if package in PACKAGES and name.endswith(".py"):
                by_package[package].append(name)
    counts = [
        mutate(
            *(package, sorted(files), Path("output/mutants") / package),
            *(options.sample, options.seed, options.seconds),
        )
        for package, files in sorted(by_package.items())
    ]
    if options.sample is None:
        return any(count.rate < GOAL for count in counts)
    sys.stdout.write(f"all, weighted by mutants: {weighted_rate(counts):.1%} killed\n")
    return weighted_rate(counts) < GOAL


if __name__ == "__main__":
    sys.exit(main())

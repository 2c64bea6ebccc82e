"""Changes the code in small ways, one at a time, and counts the changes that tests notice.

python tests/mutants.py [FILES]
python tests/mutants.py --sample N [--seed S] [FILES]

Without files: what differs from the last commit, else the files of that commit; with `--sample`,
all files of `PACKAGES`, and of each package N changes drawn at random. Of each package the tests of
its own folder run, and for each change those that reach the changed function. A change that makes
no difference to a user carries the comment `# pragma: no mutate: REASON`. Ends with status 1 if a
package is below `GOAL`, or, with `--sample`, if the total is.
"""

import argparse
import contextlib
import json
import random
import resource
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from statsmodels.stats.proportion import proportion_confint

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

MEMORY_BYTES = 6 * 2**30
"""What a process may allocate: a change can make an array too large for the machine."""

SETTINGS = """
[tool.mutmut]
source_paths = ["as2ray"]
only_mutate = {files}
pytest_add_cli_args = [
    "-m", "not slow", "-p", "no:xdist", "--fastest-first", "--hypothesis-profile=mutants",
]
pytest_add_cli_args_test_selection = ["tests/{package}"]
also_copy = ["benchmarks", "docs", "pipelines", "serve_configs", "tune_spaces", "README.md"]
# The wording of errors, descriptions and logs.
do_not_mutate_patterns = [
    '^ *(fix=)?f?".*"[,)]*$', "(fix|problem|message) ?=", "raise .*Error", "_log[.]",
    " task[(]", "lookup[(]", "import_object[(]",
]
# torch's threads do not survive a fork of the process that has used them.
process_isolation = "forkserver"
# Seconds of a test do not contain its fixtures.
timeout_constant = 20.0
timeout_multiplier = 3.0
"""
NOTICED = {"killed", "timeout", "segfault"}


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
        low, high = proportion_confint(self.killed, max(1, self.tried), method="wilson")
        return (
            f"{self.package}: {self.killed} of {self.tried} killed "
            f"({self.rate:.1%}, 95 % interval {low:.1%} to {high:.1%}), {self.total} mutants"
        )


def mutate(
    package: str, files: list[str], folder: Path, sample: int | None = None, seed: int = 0
) -> Count:
    """Runs the mutants of a package's files, or a sample of them, in a copy of the repository."""
    for name in _git("ls-files", "--cached", "--others", "--exclude-standard"):
        if Path(name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, folder / name)
    settings = SETTINGS.format(files=json.dumps(files), package=package)
    with (folder / "pyproject.toml").open("a") as project:
        project.write(settings)
    names = _mutants(files, folder)
    chosen = names if sample is None else draw(names, sample, seed)
    _mutmut(folder, "run", *([] if sample is None else chosen))
    lines = _mutmut(folder, "results", "--all", "true").splitlines()
    status = dict(line.strip().rsplit(": ", 1) for line in lines)
    for name in chosen:
        if status[name] not in NOTICED:
            sys.stdout.write(_mutmut(folder, "show", name))
    killed = sum(status[name] in NOTICED for name in chosen)
    count = Count(package, len(names), len(chosen), killed)
    sys.stdout.write(f"{count}\n")
    sys.stdout.flush()
    return count


def draw(names: list[str], sample: int, seed: int) -> list[str]:
    """At most `sample` of the names, drawn at random without replacement."""
    return sorted(random.Random(seed).sample(sorted(names), min(sample, len(names))))


def weighted_rate(counts: list[Count]) -> float:
    """Estimated share of all packages' changes that are noticed."""
    return sum(c.rate * c.total for c in counts) / max(1, sum(c.total for c in counts))


def changed_files() -> list[str]:
    """Files that differ from the last commit, or else those that it changed."""
    return _git("diff", "--name-only", "HEAD") or _git("diff", "--name-only", "HEAD~1")


def _mutants(files: list[str], folder: Path) -> list[str]:
    """Names of all changes; mutmut reads its settings in the working folder."""
    with contextlib.chdir(folder):
        from mutmut.configuration import reset_config
        from mutmut.mutation.file_mutation import mutate_file_contents
        from mutmut.utils.format_utils import get_mutant_name

        reset_config()
        return [
            get_mutant_name(Path(file), name)
            for file in files
            for name in mutate_file_contents(file, Path(file).read_text()).mutant_names
        ]


def _mutmut(folder: Path, *arguments: str) -> str:
    def limit_memory() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))

    command = [sys.executable, "-m", "mutmut", *arguments]
    ran = subprocess.run(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, preexec_fn=limit_memory
    )
    if ran.returncode:
        sys.stdout.write(ran.stdout)
        ran.check_returncode()
    return ran.stdout


def _git(*arguments: str) -> list[str]:
    ran = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True)
    return ran.stdout.splitlines()


def main() -> bool:
    """Runs the command line; whether too few changes were noticed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*")
    parser.add_argument("--sample", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    by_package = defaultdict(list)
    names = options.files or (changed_files() if options.sample is None else _git("ls-files"))
    for name in names:
        match Path(name).parts:
            case ("as2ray", package, *_) if package in PACKAGES and name.endswith(".py"):
                by_package[package].append(name)
    counts = [
        mutate(
            package, sorted(files), Path("output/mutants") / package, options.sample, options.seed
        )
        for package, files in sorted(by_package.items())
    ]
    if options.sample is None:
        return any(count.rate < GOAL for count in counts)
    sys.stdout.write(f"all, weighted by mutants: {weighted_rate(counts):.1%} killed\n")
    return weighted_rate(counts) < GOAL


if __name__ == "__main__":
    sys.exit(main())

"""Changes the code in small ways, one at a time, and counts the changes that tests notice.

python tests/mutants.py [FILES]

Without files: what differs from the last commit, else the files of that commit. Of each package the
tests of its own folder run. A change that makes no difference to a user carries the comment
`# pragma: no mutate: REASON`. Ends with status 1 if a package is below `GOAL`.
"""

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

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

SETTINGS = """
[tool.mutmut]
source_paths = ["as2ray"]
only_mutate = {files}
pytest_add_cli_args = ["-m", "not slow", "-p", "no:xdist"]
pytest_add_cli_args_test_selection = ["tests/{package}"]
also_copy = ["benchmarks", "docs", "pipelines", "serve_configs", "tune_spaces", "README.md"]
# The wording of errors, descriptions and logs.
do_not_mutate_patterns = ['^ *(fix=)?f?".*"[,)]*$', "fix=", "raise .*Error", "_log[.]"]
# torch's threads do not survive a fork of the process that has used them.
process_isolation = "forkserver"
"""


def mutate(package: str, files: list[str], folder: Path) -> float:
    """Runs the mutants of a package's files in a copy of the repository; share of those killed."""
    kept = folder / "mutants"
    for name in _git("ls-files", "--cached", "--others", "--exclude-standard"):
        if Path(name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, folder / name)
    settings = SETTINGS.format(files=json.dumps(files), package=package)
    with (folder / "pyproject.toml").open("a") as project:
        project.write(settings)
    mutmut = [sys.executable, "-m", "mutmut"]
    subprocess.run([*mutmut, "run"], cwd=folder, check=True)
    subprocess.run([*mutmut, "export-cicd-stats"], cwd=folder, check=True)
    counts = json.loads((kept / "mutmut-cicd-stats.json").read_text())
    results = subprocess.run([*mutmut, "results"], cwd=folder, check=True, capture_output=True)
    sys.stdout.write(results.stdout.decode())
    killed, total = counts["killed"] + counts["timeout"], counts["total"] - counts["skipped"]
    sys.stdout.write(f"{package}: {killed} of {total} killed ({killed / max(1, total):.1%})\n")
    return killed / max(1, total)


def changed_files() -> list[str]:
    """Files that differ from the last commit, or else those that it changed."""
    return _git("diff", "--name-only", "HEAD") or _git("diff", "--name-only", "HEAD~1")


def _git(*arguments: str) -> list[str]:
    ran = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True)
    return ran.stdout.splitlines()


if __name__ == "__main__":
    by_package = defaultdict(list)
    for name in sys.argv[1:] or changed_files():
        match Path(name).parts:
            case ("as2ray", package, *_) if package in PACKAGES and name.endswith(".py"):
                by_package[package].append(name)
    rates = [
        mutate(package, sorted(files), Path("output/mutants") / package)
        for package, files in sorted(by_package.items())
    ]
    sys.exit(any(rate < GOAL for rate in rates))

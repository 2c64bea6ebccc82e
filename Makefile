# Two commands for a newcomer: `make quickstart` and `make test`.
# Each needs Python 3.11+, make and a package index, and makes .venv from constraints.txt. The quickstart
# installs only what it needs; all other targets install every extra.

PYTHON ?= python3
BIN := .venv/bin
QUICKSTART_STAMP := .venv/quickstart-installed
STAMP := .venv/installed
PIP := $(BIN)/python -m pip install --constraint constraints.txt

# Empty, as if it were not set: the processes of a test run share compiled modules. Where nothing may
# be written, each of some hundred processes compiles as2ray, and each of pytest's all test modules.
test fast: export PYTHONDONTWRITEBYTECODE =

.PHONY: quickstart test fast mutants lint docs results size clean

$(QUICKSTART_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "as2ray needs Python 3.11+, this is " + sys.version)'
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable '.[quickstart]'
	touch $@

$(STAMP): $(QUICKSTART_STAMP)
	$(PIP) --editable '.[quickstart,development,documents,tracking,wandb,benchmarks,integrations,clients,site]'
	touch $@

quickstart: $(QUICKSTART_STAMP)
	$(BIN)/python -m pipelines.quickstart

# Three processes, a file of tests to one of them: many tests wait for other processes more than they
# work. At most two of them start Ray at a time (tests/scheduling.py).
test: $(STAMP) lint
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Without tests that took longer than 0.05 s when they ran last here, so `make test` makes it fast.
fast: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" --at-most 0.05 --numprocesses 2 --dist loadfile

# Changes the code in small ways and counts the changes that tests notice: make mutants FILES="…".
mutants: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[mutation]'
	$(BIN)/python tests/mutants.py $(FILES)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documents as a site in output/site; a link that leads nowhere is an error.
docs: $(STAMP)
	$(BIN)/python docs/build_site.py

# The page of measured results, from the JSON files in docs/results/data.
results: $(STAMP)
	$(BIN)/python -m benchmarks.results

# Executable lines of each package.
size: $(STAMP)
	$(BIN)/python -m benchmarks.size

clean:
	rm -rf .venv output

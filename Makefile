# Two commands for a newcomer: `make quickstart` and `make test`.
# Each needs Python 3.11+, make and a package index, and makes .venv from constraints.txt. The quickstart
# installs only what it needs; all other targets install every extra.

PYTHON ?= python3
BIN := .venv/bin
QUICKSTART_STAMP := .venv/quickstart-installed
STAMP := .venv/installed
COMMA := ,
EXTRAS := $(subst $() ,$(COMMA),quickstart development documents tracking wandb benchmarks integrations clients site)
PIP := $(BIN)/python -m pip install --constraint constraints.txt

# Installs with one line: on a terminal it shows what pip does at the moment, elsewhere only errors are
# added. `-q` has no progress bar, and without it pip prints several lines for each of a hundred packages.
define pip-install
@echo "pip install $(1)"
@if [ -t 1 ]; then \
	rm -f .venv/failed; \
	{ $(PIP) $(1) 2> .venv/pip-errors || touch .venv/failed; } | \
		while IFS= read -r line; do printf '\r\033[K%.78s' "$$line"; done; \
	printf '\r\033[K'; \
	test ! -e .venv/failed || { cat .venv/pip-errors; exit 1; }; \
else $(PIP) -qq $(1); fi
endef

# Empty, as if it were not set: the processes of a test run share compiled modules. Where nothing may
# be written, each of some hundred processes compiles as2ray, and each of pytest's all test modules.
test fast: export PYTHONDONTWRITEBYTECODE =

.PHONY: quickstart test fast mutants lint docs results size clean

$(QUICKSTART_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "as2ray needs Python 3.11+, this is " + sys.version)'
	@$(PYTHON) -m venv .venv
	$(call pip-install,torch)
	$(call pip-install,--editable '.[quickstart]')
	@touch $@

$(STAMP): $(QUICKSTART_STAMP)
	$(call pip-install,--editable '.[$(EXTRAS)]')
	@touch $@

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
# SAMPLE=40 draws 40 changes of each package.
mutants: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[mutation]'
	$(BIN)/python tests/mutants.py $(if $(SAMPLE),--sample $(SAMPLE)) $(FILES)

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

# Every target does its own set-up, so that each works on a fresh checkout:
#
#   make demo    train on handwritten digits with 4 ranks, kill two of them, show what happened
#   make test    all tests
#   make check   what to run before a commit: format, lint, types, the quick tests
#   make docs    the documentation as a site, in build/site
#
# VENV=path puts the virtual environment elsewhere, PYTHON=program makes it with another interpreter,
# PYTEST_ARGS="..." is passed to pytest.

VENV ?= .venv
PYTHON ?= python3.11
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-for-lightning_ft
DOCS_STAMP := $(VENV)/.installed-for-docs-of-lightning_ft
# The constraints hold for every call, so that no range in pyproject.toml ever decides on a version.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup test demo check bench docs lint format types test-quick coverage clean

help:
	@sed -n 's/^#  \{0,1\}//p' Makefile | head -9

# setuptools: a new environment's own may be too old to build what comes as source alone (antlr4, for Hydra).
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { \
	    $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	        echo "This Python can't make virtual environments; installing Debian's python3-venv."; \
	        test "$$(id -u)" = 0 && apt-get update -q && apt-get install -y -q python3-venv; \
	    } || { echo "Install python3.11 with its venv module (Debian: apt-get install python3.11-venv)." >&2; exit 1; }; \
	    echo "$(PYTHON) -m venv $(VENV)"; $(PYTHON) -m venv $(VENV); \
	}
	$(PIP) hatchling editables setuptools
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

test: setup
	@{ command -v ip && command -v promtool && command -v chromium; } >/dev/null || test "$$(id -u)" != 0 || \
	    { apt-get update -q && apt-get install -y -q --no-install-recommends iproute2 prometheus chromium fonts-dejavu-core; }
	$(BIN)/python -m pytest -n 3 $(PYTEST_ARGS)

test-quick: setup
	$(BIN)/python -m pytest -m "not slow and not gpu" tests/unit tests/property $(PYTEST_ARGS)

# The pure core has no excuse: every branch of it is taken by its own tests.
coverage: setup
	SIM_SCHEDULES=$${SIM_SCHEDULES:-500} $(BIN)/python -m pytest --cov --cov-report=term-missing --no-cov-on-fail \
	    $(wildcard tests/unit/membership tests/unit/checkpoint tests/property tests/protocol) $(PYTEST_ARGS)

check: lint types test-quick

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: setup
	$(BIN)/mypy --strict src

demo: setup
	$(BIN)/python examples/demo.py

bench: setup
	@set -e; for script in $(sort $(wildcard benchmarks/*.py)); do \
	    echo "$$script"; $(BIN)/python "$$script"; \
	done

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The first page is build/site/index.html."

$(DOCS_STAMP): $(STAMP)
	$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage build dist runs

# Every target does its own set-up, so that each works on a fresh checkout:
#
#   make demo    train on handwritten digits with 4 ranks, kill two of them, show what happened
#   make test    all tests
#   make check   what to run before a commit: format, lint, types, the quick tests
#   make docs    the documentation as a site, in build/site
#   make soak    MINUTES=10 of a job under a chaos monkey, then every promise checked from its logs; SEED=n, TASK=language
#   make bench   all benchmarks, half an hour, into benchmarks/RESULTS.md; ONLY="recovery rejoin" runs these
#
# VENV=path puts the virtual environment elsewhere, PYTHON=program makes it with another interpreter,
# PYTEST_ARGS="..." is passed to pytest.

VENV ?= .venv
PYTHON ?= python3.11
PYTEST_ARGS ?=
ONLY ?=
MINUTES ?= 10
TASK ?= digits

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-for-lightning_ft
DOCS_STAMP := $(VENV)/.installed-for-docs-of-lightning_ft
BENCH_STAMP := $(VENV)/.installed-for-benchmarks-of-lightning_ft
# The constraints hold for every call, so that no range in pyproject.toml ever decides on a version.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup test demo check bench soak docs lint format types test-quick coverage clean

help:
	@sed -n 's/^#  \{0,1\}//p' Makefile | head -11

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

bench: $(BENCH_STAMP)
	$(BIN)/python benchmarks/run.py $(ONLY)

soak: setup
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) --task $(TASK) $(if $(SEED),--seed $(SEED))

$(BENCH_STAMP): $(STAMP)
	$(PIP) --no-build-isolation --editable '.[bench]'
	@touch $@

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The first page is build/site/index.html."

$(DOCS_STAMP): $(STAMP)
	$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage build dist runs

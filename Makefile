# Each target makes the virtual environment that it needs. PYTHON picks the interpreter (3.11 to 3.13).
PYTHON ?= python3
BIN := .venv/bin
PACKAGES := cache transfer workers cluster proto
TEST_PROCESSES ?= 3
SPREAD := -n $(TEST_PROCESSES) --no-loadscope-reorder
TREE := build/import-root/tandem
# Our modules are compiled once, and not by each process of each cluster that a test starts.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-unit test-long check types format proto docs chaos clients explore mutants fuzz bench clean

help:
	@echo "make demo    several prompts at once, prefilled in one process and decoded in another"
	@echo "make test    the gate of every change: make check, and beside it the tests of all parts; at most 12 minutes"
	@echo "make test-unit  tests without processes, clusters, compilers and transformers; less than a minute"
	@echo "make test-long  the tests that the gate leaves out: all sizes, long storms, partitions, every deployment"
	@echo "make check   ruff, pyrefly, layering, documentation, generated files up to date"
	@echo "make types   pyright, which takes minutes; then it writes down what pyrefly says of such sound code"
	@echo "make format  let ruff rewrite the code"
	@echo "make proto   generate the protobuf modules"
	@echo "make docs    generate docs/configuration.md, benchmarks' RESULTS.md and the index of decisions"
	@echo "make chaos   a long storm: processes killed and stopped under load, nothing lost; prints JSON"
	@echo "make clients published clients of OpenAI's API and of gRPC talk to a cluster; they are installed below build/"
	@echo "make explore all that can happen to a request in a few small worlds, one state after another"
	@echo "make mutants one protection after another taken out of a copy: a test must notice each; some five minutes"
	@echo "make fuzz    100,000 bad inputs for services and configuration, 500,000 steps of random programs on caches,"
	@echo "             1,000 random schemas, regexes and grammars through a cluster"
	@echo "make bench   the benchmarks that this machine can run; build/bench has results and plots"
	@echo "make clean   remove the virtual environment, this checkout's caches and build/, benchmark results too"

demo: .venv/.base
	@$(BIN)/python -m tandem.cluster.tools.demo $(if $(SPECULATE),--speculate $(filter-out 1,$(SPECULATE)))

# What CI runs: it says how long each part took, and fails where one does.
test:
	@TEST_PROCESSES=$(TEST_PROCESSES) tests/gate.sh $(PYTEST_ARGUMENTS)

test-unit: .venv/.dev
	@$(BIN)/pytest --unit -q -m "not gpu and not long" -n 2

# Processes, each with whole files: what a file's tests share is made once (tests/tiers.py).
test-long: types
	@$(BIN)/pytest -q -m "long and not gpu" $(SPREAD)

check: .venv/.dev $(TREE)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/python proto/generate.py --check
	@$(BIN)/python docs/generate.py --check
	@$(BIN)/python -m tests.benchmarks.report --check
	@$(BIN)/pyrefly check
	@$(BIN)/pytest -q -m check tests/test_*.py

# pyright judges, by its reading of ten times as much. What pyrefly finds in code that pyright accepts is its baseline.
types: .venv/.dev $(TREE)
	@$(BIN)/pyright
	@$(BIN)/pyrefly check --update-baseline > /dev/null || true # it fails for what it writes down
	@$(BIN)/pyrefly check

format: .venv/.dev
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

proto: .venv/.dev
	@$(BIN)/python proto/generate.py

docs: .venv/.dev
	@$(BIN)/python docs/generate.py
	@$(BIN)/python -m tests.benchmarks.report

chaos: .venv/.dev
	@$(BIN)/python -m tests.chaos

clients: .venv/.dev
	@$(BIN)/python -m tests.clients

explore: .venv/.dev
	@$(BIN)/python -m tests.protocol

mutants: .venv/.dev
	@$(BIN)/python -m tests.mutants

fuzz: .venv/.dev
	@$(BIN)/python -m tests.fuzz
	@$(BIN)/python -m tests.fuzz.cache
	@$(BIN)/python -m tests.fuzz.guides

bench: .venv/.dev
	@$(BIN)/tandem bench

clean:
	@rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "tandem needs Python 3.11 to 3.13; set PYTHON")'
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.base: .venv/.venv pyproject.toml constraints.txt
	@echo "installing tandem into .venv (the first time this takes a while)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

# Modules are compiled when they are first imported: most of them never are.
.venv/.dev: .venv/.venv pyproject.toml constraints.txt
	@echo "installing tandem and its tools into .venv (the first time this takes a while)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $@ .venv/.base

# The folders under their import names, for type checkers.
$(TREE): Makefile
	@mkdir -p $@
	@for package in $(PACKAGES); do ln -sfn ../../../$$package $@/$$package; done
	@ln -sfn ../../../cluster/toplevel/__init__.py $@/__init__.py
	@touch $@

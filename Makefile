# make demo     everything from a fresh machine to the main job on local ranks
# make test     everything from a fresh machine to a passed test suite, all but its long cases

PYTHON ?= python3
RANKS ?= 2
ARGS ?=
# What `make matrix` installs the wheel on.
PYTHONS ?= $(PYTHON)
TORCHES ?= 2.13.0 2.14.1 2.15.0
# Halves of the suite, in order, so that cases of a file share what they compile; whoever is done
# first takes from the other.
PARALLEL ?= --numprocesses 2 --dist worksteal
# Where a run leaves its kernels to the next; TESTS_CACHE_DIR= compiles all from cold.
TESTS_CACHE_DIR ?= $(CURDIR)/build/test-cache
export TESTS_CACHE_DIR
# All there are, but for what they import.
BENCHES := $(filter-out benchmarks/slow_link.py benchmarks/lower_bound.py benchmarks/packed.py benchmarks/emitted_traffic.py benchmarks/gpu_worlds.py benchmarks/gpu_stages.py,$(wildcard benchmarks/*.py))
BIN := .venv/bin
DEMO := $(if $(wildcard .venv/.stamp),.venv,.venv-demo)

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all check format docs bench matrix clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-8s %s\n", $$1, $$2}'

venv: .venv/.stamp ## build .venv with the tested versions; nothing to do when it is current

# The package is built with the setuptools installed here, so that nothing unpinned is fetched.
# torchtitan without what it asks for: pyproject.toml says why, and has what it needs.
.venv/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev,examples,triton,trl,torchtitan]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchtitan
	touch $@

# Without the tools, trainers and test libraries of .venv, unless that is there already.
.venv-demo/.stamp: pyproject.toml constraints.txt
	@echo "installing torch and the few libraries of the demo into .venv-demo"
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install --quiet --constraint constraints.txt setuptools wheel
	@echo "pip says nothing while it unpacks: about half a minute"
	@(while sleep 8; do echo "  still installing"; done) & trap "kill $$!" EXIT; \
	.venv-demo/bin/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[demo]'
	touch $@

demo: $(DEMO)/.stamp ## train on local gloo ranks: make demo RANKS=3 ARGS='--steps 50'
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(DEMO)/bin/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/train_text.py $(ARGS)

test: venv ## run the tests, all but the long ones
	$(BIN)/python -m pytest $(PARALLEL) -m 'not long' $(ARGS)

test-all: venv ## run every test
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

check: venv ## format, lint, types, contracts of imports, fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow and not long'

format: venv ## let ruff put things right
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: venv ## build the site into build/site
	$(BIN)/mkdocs build --strict --quiet

bench: venv ## run the benchmarks one after the other
	@for bench in $(BENCHES); do echo "== $$bench"; $(BIN)/python $$bench $(ARGS) || exit 1; done

matrix: ## install the wheel on several Pythons and torches: make matrix PYTHONS=... TORCHES=...
	$(PYTHON) -m tests.support.install_matrix --pythons $(PYTHONS) --torches $(TORCHES) $(ARGS)

clean: ## remove what was built
	rm -rf .venv .venv-demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

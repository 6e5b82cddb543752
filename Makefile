# make demo     everything from a fresh machine to the main job on local ranks
# make test     everything from a fresh machine to a passed test suite

PYTHON ?= python3
RANKS ?= 2
ARGS ?=
# One file of tests stays in one process: its cases share process groups and compiles.
PARALLEL ?= --numprocesses 2 --dist loadfile
BENCHES := $(addprefix benchmarks/,traffic.py cross_compile.py overlap.py compile_time.py memory.py end_to_end.py gpu_attention.py)
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help venv demo test check format bench clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-8s %s\n", $$1, $$2}'

venv: .venv/.stamp ## build .venv with the tested versions; nothing to do when it is current

# The package is built with the setuptools installed here, so that nothing unpinned is fetched.
.venv/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev,examples,triton]'
	touch $@

demo: venv ## train on local gloo ranks: make demo RANKS=3 ARGS='--steps 50'
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/train_text.py $(ARGS)

test: venv ## run every test
	$(BIN)/python -m pytest $(PARALLEL)

check: venv ## format, lint, types, fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow'

format: venv ## let ruff put things right
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: venv ## run the benchmarks one after the other
	@for bench in $(BENCHES); do echo "== $$bench"; $(BIN)/python $$bench $(ARGS) || exit 1; done

clean: ## remove what was built
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

# make demo    the main job on embedded data, on a CPU
# make test    style, types and tests
# make bench   small versions of all benchmarks, on a CPU
# Each makes its own environment in .venv and installs what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all bench figures clean

$(VENV)/lab: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[lab]'
	touch $@

$(VENV)/dev: $(VENV)/lab
	$(BIN)/python -m pip install --quiet --editable '.[lab,dev]'
	touch $@

demo: $(VENV)/lab
	$(BIN)/incvec demo

test: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

# What is slow: every method killed at random moments, all pairs, several processes, the browser.
test-all: $(VENV)/dev
	$(BIN)/python -m pytest -n 2 -m "slow and not gpu"

bench: $(VENV)/lab
	$(BIN)/python benchmarks/ivt_overhead.py --repeats 2
	$(BIN)/python benchmarks/throughput.py --small
	$(BIN)/python benchmarks/lab_speed.py --small
	$(BIN)/python benchmarks/profile_step.py --small
	$(BIN)/python benchmarks/engine_accuracy.py --small
	$(BIN)/python benchmarks/complete_run.py --small
	$(BIN)/python benchmarks/packing.py --images 500

# The pictures in results/figures, from the numbers that lie beside them, and every page made from the records.
figures: $(VENV)/lab
	test ! -d results/figures || $(BIN)/incvec lab draw results/figures
	$(BIN)/python -m incvec.study.reproduced results
	$(BIN)/python -m incvec.study.catalog > docs/methods.md
	$(BIN)/python -m incvec.study.catalog --readme README.md

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

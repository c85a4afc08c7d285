# make demo       PODNet without and with IVT on embedded data, three seeds; about a minute on a CPU, once installed
# make test       style, types and the quick tests; what a change has to pass first
# make test-all   the slow tests: kills, all pairs of method and add-on, several processes, the browser, the plug-in in
#                 other libraries and sweeps on Ray, which it installs (300 MB)
# make test-oldest-torch   the plug-in's tests with the oldest torch that it supports (needs Python 3.11)
# make docs       the documentation site in site/; a broken link is an error
# make dist       wheel and sdist in dist/, installed into fresh environments and tried (DIST=--full downloads torch)
# make bench      small versions of all benchmarks, on a CPU
# make figures    figures and pages under results/ and docs/, generated again from the records
# make clean      removes the environment, caches and built files
#
# Each target creates the environment it needs in .venv (about 6 GB, most of it PyTorch). Options: PYTHON=python3.12
# for another interpreter, VENV=DIR for another environment, JOBS=N for the number of test processes.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
DIST ?=
BIN := $(VENV)/bin
OLDEST_TORCH := $(shell sed -n 's/^dependencies = .*torch>=\([0-9.]*\).*/\1/p' pyproject.toml)
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all test-oldest-torch docs dist bench figures clean

$(VENV)/lab: pyproject.toml
	@echo "Installing PyTorch and the other packages of the lab into $(VENV): about 6 GB, 5 to 10 minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --editable '.[lab]'
	touch $@

$(VENV)/dev: $(VENV)/lab
	$(BIN)/python -m pip install --quiet --editable '.[lab,dev]'
	touch $@

$(VENV)/hosts: $(VENV)/dev
	$(BIN)/python -m pip install --quiet --editable '.[lab,dev,hosts,cluster]'
	$(BIN)/python -m pip install --quiet --no-deps avalanche-lib==0.6.0
	touch $@

$(VENV)/docs: $(VENV)/lab
	$(BIN)/python -m pip install --quiet --editable '.[lab,docs]'
	touch $@

demo: $(VENV)/lab
	$(BIN)/incvec demo

test: $(VENV)/dev
	@echo "make test: about 7 minutes with $(JOBS) processes"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow and not gpu"

test-all: $(VENV)/hosts
	@echo "make test-all: about 7 minutes with $(JOBS) processes"
	$(BIN)/python -m pytest -n $(JOBS) -m "slow and not gpu"

.venv-oldest-torch/ready: pyproject.toml
	$(PYTHON) -m venv .venv-oldest-torch
	.venv-oldest-torch/bin/python -m pip install --quiet "torch==$(OLDEST_TORCH).*" "numpy<2" "pytest>=8" "hypothesis>=6.100"
	touch $@

# Without tests/conftest.py, which imports the lab.
test-oldest-torch: .venv-oldest-torch/ready
	PYTHONPATH=src .venv-oldest-torch/bin/python -m pytest tests/ivt --confcutdir=tests/ivt -m "not gpu"

docs: $(VENV)/docs
	$(BIN)/python -m mkdocs build --strict

dist: $(VENV)/dev
	$(BIN)/python tools/check_dist.py $(DIST)

bench: $(VENV)/lab
	$(BIN)/python benchmarks/ivt_overhead.py --repeats 2
	$(BIN)/python benchmarks/throughput.py --small
	$(BIN)/python benchmarks/lab_speed.py --small
	$(BIN)/python benchmarks/profile_step.py --small
	$(BIN)/python benchmarks/engine_accuracy.py --small
	$(BIN)/python benchmarks/complete_run.py --small
	$(BIN)/python benchmarks/packing.py --images 500
	$(BIN)/python benchmarks/startup.py --small
	$(BIN)/python benchmarks/campaign.py --small
	$(BIN)/python benchmarks/cluster_simulation.py

figures: $(VENV)/lab
	$(BIN)/incvec study gap results/cifar100 -o results/figures
	for figure in path recalibrated-path tradeoff curvature; do \
		$(BIN)/incvec study mean results/figures/podnet-5-$$figure.json results/figures/seed-*/$$figure.json \
			-o results/figures --name podnet-5-$$figure-3-seeds || exit 1; \
	done
	$(BIN)/incvec study draw results/figures
	$(BIN)/python -m incvec.study.reproduced results
	$(BIN)/python -m incvec.study.catalog > docs/methods.md
	$(BIN)/python -m incvec.study.catalog --readme README.md

clean:
	rm -rf $(VENV) .venv-oldest-torch build dist site .pytest_cache .mypy_cache .ruff_cache

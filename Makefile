# make setup   a virtual environment in .venv with everything, pearl._C built; a second call does only what is needed
# make run     setup, then train the quickstart recipe        (make run ARGS="quickstart --nproc 3 --set seed=1")
# make test    setup, then the tests that need no GPU          make test-all: the slow ones too
# make demo-elastic   setup, then a job whose workers come and go (examples/elastic.py)
# make lint    ruff, mypy, import contracts                    make clean: removes what was built, and .venv
#
# Variables: PYTHON (3.11 or later), VENV, TORCH (what pip installs as torch, before anything else can pull another build),
# TORCH_INDEX (an --index-url for it, e.g. https://download.pytorch.org/whl/cpu for a CPU build), ARGS.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
ARGS ?= quickstart
TESTS ?= tests
WORKERS ?= 2

PIP = $(VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-input
STAMP = $(VENV)/.made
TORCH_STAMP = $(STAMP)-$(subst =,_,$(TORCH))
NATIVE = setup.py $(shell find csrc -type f)
COMPILING = $(words $(filter %.cpp,$(NATIVE))) C++ files; 1 to 6 minutes on two cores, as busy as they are
# One thread per process: several processes with several threads each on few cores are many times slower.
THREADS = OMP_NUM_THREADS=1

.PHONY: setup run test test-all demo-elastic lint clean
.NOTPARALLEL:

setup: $(STAMP)-native
	@echo "setup: ready in $(VENV)"

$(STAMP)-venv:
	@echo "setup: 3 steps the first time, each silent until it is done: a virtual environment, torch, then the rest and pearl._C"
	@echo "setup: 1 of 3, making a virtual environment in $(VENV) (seconds)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Python {sys.version.split()[0]} is too old: 3.11 or later, e.g. make setup PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(TORCH_STAMP): $(STAMP)-venv
	@echo "setup: 2 of 3, installing $(TORCH) (a minute or so, more with CUDA)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)" numpy
	@rm -f $(STAMP)-torch* $(STAMP)-depends && touch $@

$(STAMP)-depends: $(TORCH_STAMP) pyproject.toml
	@echo "setup: 3 of 3, installing what pyproject.toml asks for and compiling pearl._C ($(COMPILING))"
	@$(PIP) "setuptools>=77" wheel "pybind11>=2.13" ninja
	@$(PIP) --no-build-isolation --editable ".[dev]"
	@touch $@ && touch $(STAMP)-native

# Installing what pyproject.toml asks for has built pearl._C already; if only its sources are newer, it is built alone.
$(STAMP)-native: $(STAMP)-depends $(NATIVE)
	@if [ ! -e $@ ] || [ -n "$$(find $^ -newer $@)" ]; then \
		echo "setup: its sources have changed, compiling pearl._C ($(COMPILING))" && $(PIP) --no-build-isolation --no-deps --editable .; \
	fi
	@$(VENV)/bin/python -c 'from pearl.engine.migration.blocks import backend; print("setup: KV blocks are moved by", backend())'
	@touch $@

run: setup
	@$(THREADS) $(VENV)/bin/pearl run $(ARGS)

test: setup
	@$(THREADS) $(VENV)/bin/python -m pytest $(TESTS) -q -n $(WORKERS)

test-all: setup
	@$(THREADS) $(VENV)/bin/python -m pytest $(TESTS) -q -n $(WORKERS) -m "not gpu and not multi_gpu"

demo-elastic: setup
	@$(THREADS) $(VENV)/bin/python examples/elastic.py

lint: setup
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

clean:
	@rm -rf $(VENV) build dist *.egg-info pearl/_C*.so .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find pearl tests bench -name __pycache__ -type d -exec rm -rf {} +

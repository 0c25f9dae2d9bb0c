# Everything runs in .venv, made with the Python that .python-version names (3.12 or newer).
PYTHON ?= python3
# make test JAX=0.12: with the newest jax 0.12, in an environment of its own. constraints.txt names the
# oldest that is supported.
JAX ?=
VENV := .venv$(addprefix -jax,$(JAX))
BIN := $(VENV)/bin
CONSTRAINTS := $(VENV)/constraints.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: demo gallery test test-all fuzz lint
demo: $(VENV)/examples
	$(BIN)/python examples/char_gpt.py

gallery: $(VENV)/examples
	$(BIN)/python -m examples.mask_gallery

# Those that catch most in least time; test-all has all that need no GPU.
test: TIER := -m "not slow"
test test-all: $(VENV)/tests
	$(BIN)/python -m pytest $(TIER) -n 2 --dist worksteal --timeout 300 --durations 20

# Random calls against the dense definition: make fuzz N=10000 SEED=1 START=2500 JOBS=4
N ?= 1000
SEED ?= 0
START ?= 0
JOBS ?= 2
fuzz: $(VENV)/tests
	$(BIN)/python -m tests.fuzz $(N) --seed $(SEED) --start $(START) --jobs $(JOBS)

lint: $(VENV)/tests
	$(PIP) --group lint
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright --pythonpath $(BIN)/python

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 12), "Python 3.12 or newer is needed: make PYTHON=python3.12"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"

$(CONSTRAINTS): constraints.txt $(VENV)/bin/python
	sed -E '$(if $(JAX),s/^(jax[a-z0-9-]*)==.*/\1==$(JAX).*/)' constraints.txt > $@

$(VENV)/examples: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(PIP) -e ".[examples]"
	touch $@

# The CUDA plugin without its 3 GB of libraries: compiling for a GPU needs none of them.
$(VENV)/tests: $(VENV)/examples
	$(PIP) --group test --group gate
	$(PIP) --no-deps jax-cuda13-plugin jax-cuda13-pjrt
	touch $@

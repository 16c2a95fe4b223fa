# Each target makes its virtual environment from the lock if there is none; a machine needs
# only Python (3.11 or newer) and make.

PYTHON ?= python3
NEWEST ?= python3.12
VENV ?= .venv
BIN = $(VENV)/bin
# Fast and slow tests alike; `make test PYTEST_ARGS="-k batch_norm"` runs a part.
PYTEST_ARGS ?=
RUN_TESTS = $(BIN)/python -m pytest
# Every worker and every process that a test starts would compile all modules anew, and
# pytest rewrite the asserts of four hundred files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs notebooks test test-slow nightly soak test-newest lint bench lock release clean
.DEFAULT_GOAL := test

# `make demo STRATEGY=fsdp` cuts the state over devices; the names are those of `strategies`,
# and `auto` tries several.
STRATEGY ?= data_parallel
demo: $(VENV)/.ready
	REPLICATOR_FAKE_DEVICES=$${REPLICATOR_FAKE_DEVICES-8} \
	  $(BIN)/python -m experiments.digits_resnet --strategy=$(STRATEGY)

# Three workers for two cores: a test traces and compiles on one, and some wait. Files stay
# whole, as what one compiles its tests share.
WORKERS ?= 3
# Half of their time is XLA's, for programs that run once. Slow tests, benchmarks and
# `make test-newest` compile as users do. (The newest jax does not know the last flag.)
QUICK_COMPILE = --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 \
  $$($(BIN)/python -c 'import sys; \
  print("--xla_cpu_use_fusion_emitters=false" * (sys.version_info < (3, 12)))')
# Without any flag there is no blank either: XLA takes it for the name of a file.
test: $(VENV)/.ready
	XLA_FLAGS="$${XLA_FLAGS:+$$XLA_FLAGS }$(QUICK_COMPILE)" \
	  $(RUN_TESTS) -m "not slow" -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

# They start processes of their own.
SLOW_WORKERS ?= 2
test-slow: $(VENV)/.ready
	sh tests/install_chromium.sh
	sh tests/install_sshd.sh
	$(RUN_TESTS) -m "slow and not nightly" -n $(SLOW_WORKERS) --dist loadfile $(PYTEST_ARGS)

# What takes hours: more kills and more damage than `make test-slow` has time for. Fails
# at the first number that misses its bar.
nightly: $(VENV)/.ready
	$(RUN_TESTS) -m slow $(PYTEST_ARGS)
	$(MAKE) notebooks docs
	$(BIN)/python -m benchmarks.hold kill_resume --kills=500 --terms=50
	$(BIN)/python -m benchmarks.hold kill_resume --store=s3 --kills=500 --terms=50
	$(BIN)/python -m benchmarks.hold corruption --cases=100000
	$(BIN)/python -m benchmarks.hold no_hang --runs=200
	$(BIN)/python -m benchmarks.hold strategy_matrix --full

# 64 clients of one rpc server, ten minutes: nothing may fail or grow.
soak: $(VENV)/.ready
	$(BIN)/python -m benchmarks.hold rpc_soak --clients=64 --minutes=10

test-newest:
	@$(NEWEST) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { echo \
	  'make test-newest needs Python 3.12 or newer as `$(NEWEST)`. Install it, or name' \
	  'yours: make test-newest NEWEST=python3.13 (with pyenv also set PYENV_VERSION).' >&2; \
	  exit 1; }
	$(MAKE) test VENV=.venv-newest PYTHON="$(NEWEST)" QUICK_COMPILE=

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

# The site, in `build/site`; any warning of Sphinx fails.
docs: $(VENV)/.ready
	$(BIN)/python -m sphinx -W --keep-going -q -c docs -d build/doctrees . build/site
	@echo "build/site/index.html"

# Executes the notebooks, a minute each at most, and keeps their outputs for `make docs`.
notebooks: $(VENV)/.ready
	$(BIN)/python -m benchmarks.docs.notebooks

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks

lock: SHELL := bash
lock:
	$(BIN)/python -m pip install uv
	for version in 3.11 3.12; do \
	  $(BIN)/uv pip compile --quiet --universal --python-version $$version --extra dev \
	    --generate-hashes --no-emit-index-url --no-annotate --no-header \
	    --output-file requirements/py$${version/./}.txt pyproject.toml; done

# What an upload would hold: built, checked, and its wheel run as by a stranger, with the
# newest packages that it allows. Uploads nothing.
release: $(VENV)/.ready
	rm -rf build/lib build/stranger dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/stranger
	build/stranger/bin/python -m pip install --quiet dist/*.whl
	cd build && stranger/bin/replicator demo

clean:
	rm -rf .venv .venv-newest build dist *.egg-info

# The lock for 3.11 holds the newest jax for that version; newer Pythons take the other.
$(VENV)/.ready: pyproject.toml requirements/py311.txt requirements/py312.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo 'This needs Python 3.11 to 3.13 as `$(PYTHON)`. Install one, or name yours:' \
	  'make $(MAKECMDGOALS) PYTHON=python3.12.' >&2; exit 1; }
	@echo 'Installing into $(VENV), from the lock: some minutes, 2 GB.'
	$(PYTHON) -m venv $(VENV)
	lock=$$($(BIN)/python -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")'); \
	  $(BIN)/python -m pip install --quiet --require-hashes -r requirements/$$lock.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

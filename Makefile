# make demo: train a model over an emulated cluster, Gloo against mycel.   make test: every check there is.
# Both create the environment they need in .venv; nothing outside this folder is touched.
PYTHON ?= python3.11
VENV   ?= .venv
PINS   ?= constraints.txt
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Tests that start no ranks share the processors; the others have them, one after the other.
PROCESSES ?= $(shell nproc)
# Several processes, one thread each: libraries that take all processors only get into each other's way.
PYTEST  = OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Tests start hundreds of processes: each would compile the source anew where a shell keeps Python from writing it down.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test pytest pytest-run test-long test-oldest test-newest lint docs bench bench-plans clean setup
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/mycel demo --output mycel-report

test: lint pytest

pytest: $(READY)
	$(PYTEST) -n $(PROCESSES) --dist worksteal tests/unit tests/property src
	$(PYTEST) tests/pages
	$(PYTEST) tests/distributed

test-long: $(READY) # what make test leaves out: the same at full size
	MYCEL_TESTS=long $(PYTEST) -n $(PROCESSES) -m 'long or not long' tests/property
	MYCEL_TESTS=long $(PYTEST) -m long tests/unit tests/distributed

# What torch sees of the backend; not what only starts programs that the other tests start as well.
RUN_SIDE = test_collectives test_combine test_completeness test_compression test_devices test_door test_elastic test_fault_matrix \
  test_faults test_flight test_frameworks test_fsdp_compression test_local test_meeting test_messages test_moe test_moe_codecs \
  test_proof test_restarts test_semantics test_torch_suite test_training test_warnings_of_torch

pytest-run: $(READY)
	$(PYTEST) $(RUN_SIDE:%=tests/distributed/%.py) src/mycel/runtime

test-newest: # the run side's tests with the newest torch; installs several GB, for the same reason as test-oldest
	$(MAKE) pytest-run VENV=.venv-newest PINS=constraints-newest.txt

test-oldest: # with the oldest torch that is supported; installs several GB, since its only build is the one for CUDA
	$(MAKE) pytest VENV=.venv-oldest PINS=constraints-oldest.txt

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/lint-imports

docs: $(VENV)/.docs # the documentation as a site in build/site; any warning is an error, and nothing is fetched
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open build/site/index.html"

bench: $(READY)
	$(BIN)/python benchmarks/two_boxes.py

bench-plans: $(READY) # what is planned against size and kind of fabric, and against the array's size; hours on two cores
	$(BIN)/python benchmarks/scale_plans.py
	$(BIN)/python benchmarks/sizes.py --output benchmarks/recorded/sizes.jsonl

setup: $(READY)

$(READY): pyproject.toml $(PINS)
	@command -v $(PYTHON) >/dev/null || { echo "mycel needs Python 3.11 or newer: set PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(PINS) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(PINS) --editable '.[run,plots,solver,dev]'
	$(BIN)/python -c 'import mycel.runtime; mycel.runtime.warm()'
	touch $@

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(PINS) --editable '.[run,docs]'
	touch $@

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build dist mycel-report .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

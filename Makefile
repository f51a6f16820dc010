# Every target sets itself up: a fresh clone needs Python 3.11 and make, nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/ready

# On a GPU machine PyTorch is that machine's own, with CUDA; requirements-dev.txt pins the CPU build.
GPU_PYTHON ?= python3

# Many containers set this. The tests start thousands of processes, and each would compile all it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-ci test-slow test-gpu test-gpu-slow check audit mutants fuzz soak chaos docs format clean

help:  ## what there is to run
	@awk -F':.*## *' '/^[a-z-]+:.*##/ {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## a slow rank, a flipped bit and a hang, each named and recovered from
	$(BIN)/scout demo

test: $(READY)  ## tests that need no accelerator, but for the long ones
	$(BIN)/python -m pytest -n 3 --dist worksteal

# Ranks of several tests share two cores there, so a test that fails is run once more, alone, and must pass.
test-ci: $(READY)  ## what CI runs: these and the tests marked long
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow and not gpu" || { \
	echo "The tests that failed are run once more, alone. One that passes now depends on the load: mend it."; \
	$(BIN)/python -m pytest -m "not slow and not gpu" --last-failed --last-failed-no-failures none; }

test-slow: $(READY)  ## those that CI does not run either
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

test-gpu:  ## tests on a CUDA device, with GPU_PYTHON; NCCL tests need 4 devices or NCCL 2.30
	$(GPU_PYTHON) -m pytest -m "gpu and not slow" -rs tests/gpu tests/scenarios tests/contracts

test-gpu-slow:  ## the long ones of them: healthy jobs over 2,000 steps
	$(GPU_PYTHON) -m pytest -m "gpu and slow" -rs tests/gpu

mutants: $(READY)  ## faults built into the product one by one, as tests/mutants.toml says: tests must notice
	$(BIN)/python tools/mutants.py

# In shared memory, where a file that is written again and again costs no disk access. Few arenas of malloc, since
# what threads that have ended leave to it counts as memory in use.
fuzz: $(READY)  ## every format that is read, with 100,000 mutants of valid inputs each
	SCOUT_FUZZ=100000 MALLOC_ARENA_MAX=2 $(BIN)/python -m pytest -n 2 --dist worksteal tests/fuzz \
	--basetemp=/dev/shm/torchscout-fuzz

soak: $(READY)  ## 20,000 healthy steps with all parts on: nothing may be reported, and nothing may grow
	SCOUT_SOAK=20000 $(BIN)/python -m pytest -m slow -s tests/ranks/test_soak.py -k healthy

chaos: $(READY)  ## Ten minutes of random disturbances: training goes on, and nothing is lost or left behind
	SCOUT_CHAOS=600 $(BIN)/python -m pytest -m slow -s tests/ranks/test_chaos.py

check: $(READY)  ## format, lint, types, spelling; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell

docs: $(READY)  ## the documentation as a site, in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

audit:  ## known vulnerabilities of what is installed, where pip-audit is there and reaches its database
	@if command -v pip-audit > /dev/null; then pip-audit --requirement requirements-dev.txt; \
	else echo "pip-audit is not installed: nothing was audited"; fi

format: $(READY)  ## put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(READY): requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:  ## remove what the other targets made
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build *.egg-info

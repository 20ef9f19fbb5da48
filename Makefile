# The one door: `make quickstart` trains a tiny MoE on a CPU; `make check test gate` says whether all is well.
# Each target sets up .venv first; nothing but make and a Python is needed.

# The first that runs is taken. `make setup PYTHON=python3.12` makes .venv again, with that Python, and it stays.
PYTHON ?= .venv/bin/python python3.11 python3.12 python3.13 python3
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
QUICKSTART_DIR ?= runs/quickstart
# A third of the time is waits (sandboxes, servers, launches, Slurm): three workers keep two cores busy.
TEST_WORKERS ?= 3
TEST_SGLANG_WORKERS ?= 3
# Ranks of CUDA's torch take memory, and compute all the time.
TEST_NULL_GPU_WORKERS ?= 2

BIN := .venv/bin
SGLANG_VERSION ?= 0.5.23
VERL_VERSION ?= 0.9.1
# Packages are installed once for all clones, below $(MEGARL_CACHE) or ~/.cache/megarl: tools/environments.py says how.
FIND_PYTHON = python=$$(tools/find_python $(PYTHON))
SETUP = @$(FIND_PYTHON) && "$$python" tools/environments.py
# This clone's megarl with its entry points, beside verl.
VERL_PYTEST = PYTHONPATH=$(CURDIR):$$(echo $(CURDIR)/.venv/lib/python3.*/site-packages) .venv-verl/bin/python -m pytest -q tests/adapters/test_verl*.py
PYTEST = $(BIN)/python -m pytest -q --dist loadfile --no-loadscope-reorder

# One thread per process: several ranks on few cores slow each other down a hundredfold otherwise.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup docs sglang-cpu quickstart bench null-gpu verl test gate test-all test-fast test-null-gpu test-pythons test-sglang test-verl check mutation format clean clean-cache
.DEFAULT_GOAL := help

help:
	@echo "make setup       create .venv and install megarl with pinned versions (CPU build of torch)"
	@echo "make quickstart  train a tiny MoE with RL on the CPU and write a report to $(QUICKSTART_DIR)"
	@echo "make bench       measure speed and memory side by side, write docs/benchmarks.md, fail where a budget is broken"
	@echo "make sglang-cpu  create .venv-sglang with SGLang $(SGLANG_VERSION) for the CPU (3.2 GB; SGLANG_VERSION= takes another)"
	@echo "make null-gpu    create .venv-null-gpu with CUDA torch and Transformer Engine, for a GPU that computes nothing (6 GB)"
	@echo "make verl        create .venv-verl with verl $(VERL_VERSION), beside megarl's packages (400 MB)"
	@echo "make test        the tests that take minutes together; skips those whose programs are absent, and lists them"
	@echo "make gate        short runs of the real parts: SGLang, Slurm, the null GPU, the wheel, the documentation"
	@echo "make test-all    all tests that need no GPU: docs, test-fast, test-null-gpu, test-pythons, test-sglang, test-verl"
	@echo "make test-fast   tests that need neither SGLang nor the null GPU"
	@echo "make test-null-gpu those of CUDA, NCCL and Transformer Engine, on the null GPU"
	@echo "make test-pythons a fast part of the tests with the newest Python up to 3.13 that the machine has, less with those between"
	@echo "make test-sglang those against real SGLang servers"
	@echo "make test-verl   those of megarl's objectives in the real verl"
	@echo "make docs        write the generated pages anew, build the documentation into build/site; a broken link fails"
	@echo "make check       lint, format, types, floors, plain words"
	@echo "make mutation    whether the tests notice a changed operator or number (core, and samples elsewhere)"
	@echo "make format      let ruff put the code in order"
	@echo "make clean       remove .venv, .venv-*, build/site, caches of tools and $(QUICKSTART_DIR)"
	@echo "make clean-cache remove the packages that all clones share"

setup:
	$(SETUP) megarl .venv

# A real SGLang server for the CPU, in an environment of its own: it pins other versions than megarl.
sglang-cpu:
	$(SETUP) sglang $(SGLANG_VERSION)

# Takes the machine for itself: close other programs.
bench: setup sglang-cpu
	@$(BIN)/python tools/bench.py

# CUDA torch, Transformer Engine and a device that computes nothing (tests/null_gpu). The device is built when it is first used.
null-gpu: setup
	$(SETUP) null-gpu

verl: setup
	$(SETUP) verl $(VERL_VERSION)

quickstart: setup
	@$(BIN)/megarl quickstart --out $(QUICKSTART_DIR)

test: setup
	@$(PYTEST) -n $(TEST_WORKERS) -m "not (gpu or null_gpu or sglang or slow)" $(PYTEST_ARGS)

# What continuous integration runs after check and test (.ci/run): the tests marked gate.
gate: setup docs sglang-cpu null-gpu verl
	@$(PYTEST) -n $(TEST_SGLANG_WORKERS) -m "gate and not null_gpu" $(PYTEST_ARGS)
	@tests/null_gpu/python -m pytest -q --dist loadfile -n $(TEST_NULL_GPU_WORKERS) -m gate tests/null_gpu $(PYTEST_ARGS)
	@$(VERL_PYTEST) -m gate $(PYTEST_ARGS)

# One after the other.
test-all: docs test-fast test-null-gpu test-pythons test-sglang test-verl

test-fast: setup
	@$(PYTEST) -n $(TEST_WORKERS) -m "not (gpu or null_gpu or sglang)" $(PYTEST_ARGS)

test-null-gpu: null-gpu
	@tests/null_gpu/python -m pytest -q --dist loadfile -n $(TEST_NULL_GPU_WORKERS) tests/null_gpu $(PYTEST_ARGS)
	@NULL_GPU_WITHOUT_TE=1 PYTHONPATH=$(CURDIR)/tests tests/null_gpu/python -m pytest -q --dist loadfile -n $(TEST_NULL_GPU_WORKERS) \
		-p null_gpu.everywhere $$(grep -v "^#" tests/null_gpu/selection.txt) $(PYTEST_ARGS)

# In .venv-3.12 and .venv-3.13, where torch is a build for CUDA of 5.6 GB.
test-pythons: setup
	@TEST_WORKERS=$(TEST_WORKERS) tools/test_pythons $(PYTEST_ARGS)

test-sglang: setup sglang-cpu
	@$(PYTEST) -n $(TEST_SGLANG_WORKERS) -m sglang $(PYTEST_ARGS)

test-verl: verl
	@$(VERL_PYTEST) $(PYTEST_ARGS)

check: setup
	@$(BIN)/ruff check --quiet . && echo "check: lint ok"
	@$(BIN)/ruff format --quiet --check . && echo "check: format ok"
	@$(BIN)/pyright --warnings >.venv/pyright.log 2>&1 && echo "check: types ok" || { cat .venv/pyright.log; exit 1; }
	@$(BIN)/lint-imports >.venv/lint-imports.log 2>&1 && echo "check: floors ok" || { cat .venv/lint-imports.log; exit 1; }
	@$(BIN)/python tools/plain_words.py && echo "check: words ok"
	@$(BIN)/python tools/import_closures.py >.venv/closures.log && echo "check: kit ok" || { cat .venv/closures.log; exit 1; }

# In an environment of its own, which does not have megarl: mkdocstrings reads the code without importing it.
# With --quiet, warnings would not be counted, and --strict would let broken links pass.
docs: setup
	$(SETUP) docs
	@$(BIN)/python tools/generated_pages.py && NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict && echo "docs: build/site/index.html"

mutation: setup
	@$(BIN)/python tools/mutate.py
	@$(BIN)/python tools/mutate.py --sampled

format: setup
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .

clean:
	rm -rf .venv .venv-* build/site .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info $(QUICKSTART_DIR)

clean-cache:
	$(FIND_PYTHON) && cd "$$("$$python" tools/environments.py cache)" && rm -rf megarl-* sglang-* null-gpu-* verl-* docs-* sinks-* megatron-* transformers-* triton-* clones

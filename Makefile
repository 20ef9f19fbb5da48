# The one door: `make quickstart` trains a tiny MoE on a CPU, `make test` and `make check` say whether all is well.
# Each target sets up .venv first; nothing but Python 3.11 and make is needed.

PYTHON ?= $(shell command -v python3.11 || echo python3)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
QUICKSTART_DIR ?= runs/quickstart

BIN := .venv/bin
STAMP := .venv/.setup-done
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# One thread per process: several ranks on few cores slow each other down a hundredfold otherwise.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup quickstart test check format clean
.DEFAULT_GOAL := help

help:
	@echo "make setup       create .venv and install megarl with pinned versions (CPU build of torch)"
	@echo "make quickstart  train a tiny MoE with RL on the CPU and write a report to $(QUICKSTART_DIR)"
	@echo "make test        all tests that need no GPU"
	@echo "make check       lint, format, types, floors"
	@echo "make format      let ruff put the code in order"
	@echo "make clean       remove .venv, caches and $(QUICKSTART_DIR)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "megarl needs Python 3.11: found no $(PYTHON); install it or run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "setup: creating .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; }
	@echo "setup: installing torch for the CPU"
	@# The +cpu build first, from the configured indexes or from PyTorch's own; only where there is none (macOS) the plain one.
	@$(BIN)/python -c "from importlib.metadata import version; assert version('torch').split('+')[0] == '2.13.0'" 2>/dev/null \
		|| $(PIP) "torch==2.13.0+cpu" 2>/dev/null \
		|| $(PIP) "torch==2.13.0+cpu" --index-url $(TORCH_CPU_INDEX) 2>/dev/null \
		|| { echo "setup: found no CPU build, installing the default build of torch"; $(PIP) "torch==2.13.0"; }
	@echo "setup: installing megarl and its dependencies (about a minute)"
	@$(PIP) --editable ".[cpu,dev]"
	@touch $@
	@echo "setup: done"

quickstart: $(STAMP)
	@$(BIN)/megarl quickstart --out $(QUICKSTART_DIR)

test: $(STAMP)
	@$(BIN)/python -m pytest -q -m "not gpu" $(PYTEST_ARGS)

check: $(STAMP)
	@$(BIN)/ruff check --quiet . && echo "check: lint ok"
	@$(BIN)/ruff format --quiet --check . && echo "check: format ok"
	@$(BIN)/pyright --warnings >.venv/pyright.log 2>&1 && echo "check: types ok" || { cat .venv/pyright.log; exit 1; }
	@$(BIN)/lint-imports >.venv/lint-imports.log 2>&1 && echo "check: floors ok" || { cat .venv/lint-imports.log; exit 1; }

format: $(STAMP)
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info $(QUICKSTART_DIR)

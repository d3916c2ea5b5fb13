# Everything a newcomer and the checks need. `make help` lists the targets.

PYTHON ?= python3
MODEL ?= demo
PORT ?= 8000
PREFILL ?=
DECODE ?= 1
DTYPE ?= auto
TRANSPORT ?= auto
DEVICE ?= auto
MINUTES ?=
# Of make prove: references, orders, features, kills, attack; all without any.
PARTS ?=
# Tensor-parallel ranks of decode workers in fault suites.
DECODE_TP ?= 1
# Whose signatures the tests read; without its CUDA dependencies, which are gigabytes.
FLASHINFER := 0.7.2.post1
# Processes that run tests, a file each.
JOBS ?= 4
ARGS ?=
PIP_ARGS ?=

define NO_GPU
"no NVIDIA GPU is here, and without a wheel index PyTorch brings gigabytes of CUDA libraries" \
"for its CPU wheels: export PIP_EXTRA_INDEX_URL=ADDRESS, which https://pytorch.org/get-started/locally shows for Linux, Pip, CPU" \
"to take the libraries all the same: make serve PIP_ARGS=--no-input"
endef
BIN := .venv/bin
RUN_STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev
PROTOS := $(wildcard protos/*.proto)
PROTOC = $(BIN)/python -m grpc_tools.protoc -I. --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS)
FRESH := build/fresh
PAGES := README.md LICENSE docs deploy/README.md deploy/kubernetes/README.md deploy/monitoring examples/README.md demo/*.md \
    tests/*/README.md protos/inference.proto

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve test check protos gpu-check bench-spec bench-peers families prove attack nightly faults chaos soak clients screenshots containers lock audit docs wheel clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(RUN_STAMP) ## Start a service; takes MODEL PORT PREFILL DECODE DTYPE TRANSPORT DEVICE, and ARGS for any other option
	@exec $(BIN)/baton serve --model "$(MODEL)" --port "$(PORT)" $(if $(PREFILL),--prefill-workers "$(PREFILL)") \
	    --decode-workers "$(DECODE)" --dtype "$(DTYPE)" --transport "$(TRANSPORT)" --device "$(DEVICE)" $(ARGS)

test: $(DEV_STAMP) ## Run the tests; takes JOBS, and ARGS for pytest
	$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder $(ARGS)

check: $(DEV_STAMP) ## Generated code fresh, style, types, imports between packages, lengths and links of documents
	@rm -rf $(FRESH) && mkdir -p $(FRESH)
	$(call PROTOC,$(FRESH))
	@for file in $(FRESH)/protos/*; do cmp "$$file" "protos/$${file##*/}" \
	    || { echo "make: protos/$${file##*/} is stale: run make protos and commit it"; exit 1; } >&2; done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/documents

protos: $(DEV_STAMP) ## Generate code from protos/*.proto
	$(call PROTOC,.)

gpu-check: $(DEV_STAMP) ## Run the checks that need a GPU, the table goes into docs/GPU.md; takes MINUTES of churn
	$(BIN)/python -m bench.gpu_check $(ARGS)

bench-spec: $(DEV_STAMP) ## Measure TPOT with and without speculation; ARGS= goes to bench.spec
	$(BIN)/python -m bench.spec $(ARGS)

bench-peers: $(DEV_STAMP) ## Measure Baton beside vLLM, llama.cpp, OpenVINO and transformers; ARGS= goes to bench.peers run
	$(BIN)/python -m bench.peers run --document docs/BENCHMARKS.md $(ARGS)

families: $(DEV_STAMP) ## Compare families and formats with transformers through the whole service, native ones with 1 rank and with 2
	TEST_FAMILIES=1 $(BIN)/python -m pytest -n 2 -m 'not faults' tests/services/test_ring_tokens.py tests/services/test_images.py \
	    tests/services/test_adapters_service.py tests/services/test_draft_heads.py tests/deploy/test_gateway_packages.py $(ARGS)
	TEST_FAMILIES=tp $(BIN)/python -m pytest -n 2 tests/services/test_ring_tokens.py tests/services/test_images.py $(ARGS)
	TEST_FAMILIES=fallback $(BIN)/python -m pytest -n 2 tests/services/test_ring_tokens.py $(ARGS)
	TEST_FAMILIES=formats $(BIN)/python -m pytest -n 2 tests/services/test_ring_tokens.py $(ARGS)

prove: $(DEV_STAMP) ## Attack a service of real processes: 15 minutes, the table goes into docs/RELIABILITY.md; takes PARTS, MINUTES of kills
	$(BIN)/python -m tests.prove $(or $(PARTS),--document docs/RELIABILITY.md) $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

attack: $(DEV_STAMP) ## Attack a service with an ordinary key, and print what that cost the others: 6 minutes; ARGS= names cases
	$(BIN)/python -m tests.attack $(ARGS)

nightly: $(DEV_STAMP) ## What takes hours: all that make test leaves out, attacks, more examples of fuzzers, schedules of faults, families and tokens, nvcc
	$(BIN)/python -m tests.attack.folders --seconds 600
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -n $(JOBS) -m 'hypothesis and not faults'
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -n $(JOBS) tests/gateway/api/test_fuzz_public.py \
	    tests/gateway/api/test_schemathesis.py tests/gateway/tools tests/gateway/batches tests/runtime/test_fuzz_config.py \
	    tests/services/test_adversaries.py tests/services/test_fuzz_workers.py
	TEST_SCHEDULES=10000 TEST_CARDS=all TEST_CONTEXT=128000 TEST_FAMILIES=all $(BIN)/python -m pytest -n $(JOBS) -m 'not faults' \
	    tests/simulator tests/engine/test_gpu_compile.py tests/services/test_long_context.py \
	    tests/engine/test_fallback.py tests/services/test_states.py tests/bench/test_gpu_check.py
	$(BIN)/python -m pytest -n $(JOBS) -m nightly
	$(BIN)/python -m tests.prove --minutes $(or $(MINUTES),5)
	$(BIN)/python -m pip install --quiet --upgrade --target build/cuda "cuda-toolkit[crt,curand,nvcc,nvvm]==13.0.*"
	CUDA_HOME="$(CURDIR)/build/cuda/nvidia/cu13" $(BIN)/python -m bench.gpu_checks.prebuild build/nightly-aot \
	    --architectures 9.0a --dtypes bfloat16 --kv-dtypes auto --head-dims 64 --head-dims 128 --head-dims 512

faults: $(DEV_STAMP) ## Test faults between real processes; tests/faults/README.md lists which; takes DECODE_TP
	DECODE_TP="$(DECODE_TP)" $(BIN)/python -m pytest -m faults tests/faults tests/bench/test_gpu_check.py $(ARGS)

chaos: $(DEV_STAMP) ## Kill workers under load and compare every answer; takes MINUTES DECODE_TP
	DECODE_TP="$(DECODE_TP)" $(BIN)/python -m tests.faults.chaos --minutes $(or $(MINUTES),5) $(ARGS)

soak: $(DEV_STAMP) ## Load with cancels, bad input and restarts; memory, files and pages must stay flat; takes MINUTES
	$(BIN)/python -m tests.faults.soak --minutes $(or $(MINUTES),15) --restart-every-s 120 $(ARGS)

clients: $(DEV_STAMP) ## Try client libraries and coding agents, each installed from its registry; ARGS= names some
	$(BIN)/python -m tests.clients.run $(ARGS)

containers: $(DEV_STAMP) ## Build the images for CPUs and run the compose file, the table goes into deploy/README.md; needs Docker, or root and dockerd
	$(BIN)/python -m tests.containers --document deploy/README.md $(ARGS)

screenshots: $(DEV_STAMP) ## Take the pictures of docs/images from a running service; needs Chromium and tmux
	$(BIN)/python -m tests.screenshots

lock: $(DEV_STAMP) ## Write the lock files of the images: needs PyPI
	$(BIN)/python deploy/lock.py

audit: $(DEV_STAMP) ## Look for known vulnerabilities, and write build/sbom.json (CycloneDX): needs a network
	$(PYTHON) -m venv build/audit && build/audit/bin/python -m pip install --quiet 'pip-audit>=2.9,<3'
	for lock in deploy/*-requirements.lock; do build/audit/bin/pip-audit --disable-pip --requirement $$lock || exit; done
	build/audit/bin/pip-audit --local --path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	    --skip-editable --format cyclonedx-json --output build/sbom.json

docs: $(RUN_STAMP) ## Build these documents as a site, build/site; installs zensical
	@$(BIN)/python -c 'import zensical' 2>/dev/null || $(BIN)/python -m pip install $(PIP_ARGS) --editable '.[docs]'
	rm -rf build/pages && mkdir -p build/pages
	cp --recursive --parents $(PAGES) build/pages
	$(BIN)/zensical build --strict --config-file mkdocs.yml

wheel: | .venv/bin/python ## Build dist/baton-VERSION-py3-none-any.whl, which needs no checkout
	$(BIN)/python -m pip wheel $(PIP_ARGS) --no-deps --wheel-dir dist .

clean: ## Remove what was built
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: $(PYTHON) is missing or older than 3.11: install Python 3.11, or name one by make PYTHON=python3.11"; exit 1; } >&2
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "make: no virtual environment: install python3-venv"; exit 1; } >&2

# Without an NVIDIA GPU, it asks where torch is to come from, unless pip knows an index, or torch is there.
$(RUN_STAMP): pyproject.toml | .venv/bin/python
	@$(if $(PIP_ARGS),,command -v nvidia-smi > /dev/null || $(BIN)/python -m pip config list | grep -q index-url || \
	    $(BIN)/python -m pip show --quiet torch 2> /dev/null || { printf 'make: %s\n' $(NO_GPU); exit 1; } >&2)
	$(BIN)/python -m pip install $(PIP_ARGS) --editable .
	@touch $@

$(DEV_STAMP): pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install $(PIP_ARGS) --editable '.[dev]'
	$(BIN)/python -m pip install $(PIP_ARGS) --no-deps flashinfer-python==$(FLASHINFER)
	@touch $@ $(RUN_STAMP)

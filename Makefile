# Every command of the project; `make` alone lists them. ARGS goes to the program
# that a target runs: make test-unit ARGS="-k scheduler", make serve ARGS="--help".
# JOBS is how many test files run side by side (0: one after the other, in one process).
SHELL := bash
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
JOBS ?= 2
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder
CODE := $(wildcard orca_dist kernels launch scripts tests examples)
SCRIPTS := $(wildcard scripts/*.sh launch/*.sh launch/*.sbatch) .ci/run
ARGS ?=

# Proxies are for the network: our own calls on this machine must not go through one.
comma := ,
unproxied := $(or $(no_proxy),$(NO_PROXY))
ifneq ($(unproxied),*)
unproxied := $(if $(unproxied),$(unproxied)$(comma))localhost,127.0.0.1,::1
endif
export no_proxy := $(unproxied)
export NO_PROXY := $(unproxied)

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-unit test-all test-slurm test-gpu check stubs docs clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

setup: ## Make .venv with everything in it (every target does so by itself)
	@scripts/setup.sh

demo: setup ## Serve a small model on this machine and talk to it
	@$(BIN)/python launch/demo.py $(ARGS)

serve: setup ## Run orca-dist serve, with ARGS="MODEL --flags"
	@$(BIN)/orca-dist serve $(ARGS)

test: setup ## Run all tests but the slowest and those that need a GPU
	$(PYTEST) $(SIDE_BY_SIDE) -m "not gpu and not slow" $(ARGS)

test-unit: setup ## Run the unit tests: no Ray, under a minute
	$(PYTEST) $(SIDE_BY_SIDE) -m "not gpu and not slow" tests/unit $(ARGS)

test-all: test ## Run every test that this kind of machine can run
	-scripts/install.sh ip=iproute2 sshd=openssh-server rsync=rsync unshare=util-linux
	$(PYTEST) $(SIDE_BY_SIDE) -m "slow and not gpu" --ignore=tests/slurm $(ARGS)
	scripts/test_slurm.sh $(ARGS)

test-slurm: setup ## Run the tests with a real Slurm, installed by apt (as root)
	scripts/test_slurm.sh $(ARGS)

test-gpu: setup ## Run the tests that need a CUDA device
	@$(BIN)/python -c "import sys, torch; torch.cuda.is_available() or sys.exit('test-gpu: torch sees no CUDA device here')"
	$(PYTEST) -m gpu $(ARGS)

check: setup ## Lint, types, imports, stubs, shell scripts and generated docs
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports
	scripts/stubs.sh --check
	$(BIN)/shellcheck $(SCRIPTS)
	$(BIN)/python scripts/docs_cli.py --check
	$(BIN)/python scripts/docs_api.py --check
	$(BIN)/python scripts/docs_errors.py --check

stubs: setup ## Generate orca_dist/proto/v1 from protos/v1
	scripts/stubs.sh

docs: setup ## Generate docs/cli.md, api.md and errors.md from the code
	$(BIN)/python scripts/docs_cli.py
	$(BIN)/python scripts/docs_api.py
	$(BIN)/python scripts/docs_errors.py

clean: ## Remove caches and build outputs (.venv stays)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

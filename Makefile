# make train: trains a small real model on this machine; everything it needs is installed first, into .venv.
# make test:  lint, types, doctests and the tests of user-visible behaviour, likewise.
# make quick: lint, types and the fast tests that need no engine, for the inner loop.
# make test-all: everything: also the tests marked nightly, then those marked alone, one at a time.
# make test-faults: 250 kills of runs and 1,000 damaged copies of runs; KILLS=1000 for more.
# make docs: the site, in site/; every warning and broken link is an error.
# make test-seeds: 10,000 seeds of the simulation of faults, a quarter of an hour; SEEDS=1000 for fewer.
# make audit: known vulnerabilities of what `pip install grpo-rl[cpu]` resolves to, by pip-audit; needs the network.
# make fuzz: N=1000000 hostile inputs for each reader of foreign text (tests/fuzz/).
# make gpu-check: tests marked gpu and figures, by rows of at most 200 s (15 minutes in all); without a GPU at toy sizes.
# Variables: ARGS="..." for more settings of the run, TEST_PROCESSES=4, BACKEND=cpu|cuda, PYTHON=/path/to/python3.12.

SHELL := /bin/bash
PYTHON ?=
BACKEND ?=
TEST_PROCESSES ?= 4
SEEDS ?= 10000
KILLS ?= 250
ARGS ?=
N ?= 1000000
# What make quick leaves out: engines, scripts and processes of their own, and imports of vLLM.
NOT_QUICK := $(addprefix tests/,benchmarks cluster distributed engines faults gpu run simulation sota weights) \
	tests/collectors/test_tool_conversations.py grpo_rl/cluster grpo_rl/engines/vllm
RUN := .venv/.installed-run
DEV := .venv/.installed-dev

# vLLM has no build for macOS.
ifeq ($(shell uname),Darwin)
ENGINE := inference_model.engine=transformers
endif

.PHONY: docs help setup train test quick test-all test-seeds test-faults fuzz audit lint types pytest quick-tests bench gpu-check clean
.DEFAULT_GOAL := help

help:
	@echo "make train   install, then train the quickstart (7 to 15 minutes on 2 CPU cores); ARGS='optimizer.lr=2e-5 ...'"
	@echo "make test    install, then lint, types, doctests and the tests of user-visible behaviour (7 minutes on 2 CPU cores with AVX-512)"
	@echo "make quick   install, then lint, types and the fast tests that need no engine (a minute and a quarter)"
	@echo "make test-all    install, then everything, nightly and before a release (40 to 65 minutes)"
	@echo "make test-seeds   install, then 10,000 seeds of the simulation of faults, a quarter of an hour; SEEDS=1000 for fewer"
	@echo "make test-faults   install, then 250 kills of runs and 1,000 damaged copies of runs; KILLS=1000 for more"
	@echo "make fuzz    install, then N=1000000 hostile inputs for each reader of foreign text; ARGS='--target calculate' for one"
	@echo "make audit   known vulnerabilities of what pip install grpo-rl[cpu] resolves to; needs the network"
	@echo "make docs    install, then the docs as a site in site/; warnings and broken links are errors"
	@echo "make setup   only install, with what the tests need"
	@echo "make bench   install, then all benchmarks and benchmarks/README.md; wants a quiet machine, and \$$GRPO_RL_DATA"
	@echo "make gpu-check   install, then the tests marked gpu and figures, by rows: ARGS='--rows tests head'; without a GPU at toy sizes"
	@echo "make lint | types | pytest | clean"

setup: $(DEV)

# A stamp is written last: an interrupted install has none, and is resumed.
$(RUN): setup.py tools/install.sh
	@PYTHON="$(PYTHON)" BACKEND="$(BACKEND)" tools/install.sh run

$(DEV): $(RUN)
	@PYTHON="$(PYTHON)" BACKEND="$(BACKEND)" tools/install.sh dev

train: $(RUN)
	.venv/bin/python sota/grpo.py +experiment=quickstart $(ENGINE) $(ARGS)

# Pyrefly takes five seconds, next to tests that wait for their processes.
test: lint
	@$(MAKE) --no-print-directory -j 2 types pytest

quick: $(DEV)
	@$(MAKE) --no-print-directory -j 2 types lint quick-tests

lint: $(DEV)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: $(DEV)
	.venv/bin/pyrefly check

# Test processes share out the files. Without bytecode each of them would compile ours anew.
PYTEST := PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest
IN_PARALLEL := $(PYTEST) -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

pytest: $(DEV)
	$(IN_PARALLEL) -m "not nightly" $(ARGS)

quick-tests: $(DEV)
	$(PYTEST) -q -n 2 --dist loadfile --no-loadscope-reorder -m "not nightly and not slow" \
		$(addprefix --ignore=,$(NOT_QUICK)) $(ARGS)

test-all: lint types
	@status=0; \
	$(IN_PARALLEL) -m "not alone" $(ARGS) || status=1; \
	$(PYTEST) -m alone $$(grep -rl --include=*.py mark.alone tests) $(ARGS) || [ $$? -eq 5 ] || status=1; \
	exit $$status

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "site/index.html"

test-seeds: $(DEV)
	PYTHONPATH=tests .venv/bin/python -m simulation --seeds $(SEEDS) $(ARGS)

# All run whatever comes of those before.
test-faults: $(DEV)
	@status=0; \
	.venv/bin/python tests/faults/torn.py || status=1; \
	.venv/bin/python tests/faults/kills.py --kills $(KILLS) $(ARGS) || status=1; \
	exit $$status

# Asks the advisory database, so it needs the network and is no part of make test.
audit:
	@PYTHON="$(PYTHON)" tools/audit.sh $(ARGS)

fuzz: $(DEV)
	.venv/bin/python tests/fuzz --count $(N) $(ARGS)

bench: $(DEV)
	.venv/bin/python benchmarks/run_all.py $(ARGS)

gpu-check: $(DEV)
	.venv/bin/python benchmarks/gpu.py $(ARGS)

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis

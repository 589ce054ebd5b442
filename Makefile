# make train: trains a small real model on this machine; everything it needs is installed first, into .venv.
# make test:  lint, types, tests and doctests, likewise.
# make quick: lint, types and the fast tests that need no engine, for the inner loop.
# make test-faults: 250 kills of runs and 1,000 damaged copies of runs; KILLS=1000 for more.
# make docs: the site, in site/; every warning and broken link is an error.
# make test-slow: the tests marked nightly: dear cases beside those in make test.
# make test-seeds: 10,000 seeds of the simulation of faults, a quarter of an hour; SEEDS=1000 for fewer.
# make audit: known vulnerabilities of what `pip install grpo-rl[cpu]` resolves to, by pip-audit; needs the network.
# make fuzz: N=1000000 hostile inputs for each reader of foreign text (tests/fuzz/).
# make test-models: every causal language model of transformers against its own forward, a minute or two.
# make gpu-check: tests marked gpu, then benchmarks/gpu.py (12 minutes at most); without a GPU at toy sizes.
# Variables: ARGS="..." for more settings of the run, TEST_PROCESSES=4, BACKEND=cpu|cuda, PYTHON=/path/to/python3.12.

SHELL := /bin/bash
PYTHON ?=
BACKEND ?=
TEST_PROCESSES ?= 4
SEEDS ?= 10000
KILLS ?= 250
ARGS ?=
N ?= 1000000
# What make quick leaves out: engines, scripts and processes of their own.
ENGINE_FOLDERS := $(addprefix tests/,benchmarks cluster distributed engines faults gpu run sota weights) \
	grpo_rl/cluster grpo_rl/engines/vllm
IN_PARALLEL := not alone and not models and not nightly
RUN := .venv/.installed-run
DEV := .venv/.installed-dev

# vLLM has no build for macOS.
ifeq ($(shell uname),Darwin)
ENGINE := inference_model.engine=transformers
endif

.PHONY: docs help setup train test quick test-slow test-seeds test-models test-faults fuzz audit lint types pytest quick-tests bench gpu-check clean
.DEFAULT_GOAL := help

help:
	@echo "make train   install, then train the quickstart (7 to 15 minutes on 2 CPU cores); ARGS='optimizer.lr=2e-5 ...'"
	@echo "make test    install, then lint, types, tests, doctests"
	@echo "make quick   install, then lint, types and the fast tests that need no engine (a minute and a half on 2 CPU cores)"
	@echo "make test-slow   install, then the tests marked nightly, too long for make test (15 minutes on 2 CPU cores)"
	@echo "make test-seeds   install, then 10,000 seeds of the simulation of faults, a quarter of an hour; SEEDS=1000 for fewer"
	@echo "make test-models   install, then all models that transformers has, against their own forward"
	@echo "make test-faults   install, then 250 kills of runs and 1,000 damaged copies of runs; KILLS=1000 for more"
	@echo "make fuzz    install, then N=1000000 hostile inputs for each reader of foreign text; ARGS='--target calculate' for one"
	@echo "make audit   known vulnerabilities of what pip install grpo-rl[cpu] resolves to; needs the network"
	@echo "make docs    install, then the docs as a site in site/; warnings and broken links are errors"
	@echo "make setup   only install, with what the tests need"
	@echo "make bench   install, then all benchmarks and benchmarks/README.md; wants a quiet machine, and \$$GRPO_RL_DATA"
	@echo "make gpu-check   install, then the tests marked gpu and benchmarks/gpu.py; without a GPU at toy sizes"
	@echo "make lint | types | pytest | clean"

setup: $(DEV)

# A stamp is written last: an interrupted install has none, and is resumed.
$(RUN): setup.py tools/install.sh
	@PYTHON="$(PYTHON)" BACKEND="$(BACKEND)" tools/install.sh run

$(DEV): $(RUN)
	@PYTHON="$(PYTHON)" BACKEND="$(BACKEND)" tools/install.sh dev

train: $(RUN)
	.venv/bin/python sota/grpo.py +experiment=quickstart $(ENGINE) $(ARGS)

# Pyright takes one core, beside tests that wait for their processes.
test: lint
	@$(MAKE) --no-print-directory -j 2 types pytest

quick: $(DEV)
	@$(MAKE) --no-print-directory -j 2 types lint quick-tests

lint: $(DEV)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: $(DEV)
	.venv/bin/pyright

# Or each of many processes compiles our files anew.
pytest: export PYTHONDONTWRITEBYTECODE =
pytest: $(DEV)
	.venv/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "$(IN_PARALLEL)" $(ARGS) \
		|| { [ $$? -eq 1 ] && echo "Once more, one at a time, what failed beside the others:" \
		&& .venv/bin/python -m pytest -n 1 -x --last-failed --last-failed-no-failures none -m "$(IN_PARALLEL)" $(ARGS); }
	.venv/bin/python -m pytest -m "alone and not nightly" $$(grep -rl --include=*.py pytest.mark.alone tests) $(ARGS)

quick-tests: export PYTHONDONTWRITEBYTECODE =
quick-tests: $(DEV)
	.venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
		-m "not slow and not engine and not alone and not models and not network and not nightly" \
		$(addprefix --ignore=,$(ENGINE_FOLDERS)) $(ARGS)

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "site/index.html"

test-slow: $(DEV)
	.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "nightly and not alone" \
		$$(grep -rl --include=*.py mark.nightly tests) $(ARGS)
	.venv/bin/python -m pytest -m "nightly and alone" $$(grep -rl --include=*.py mark.alone tests) $(ARGS)

test-models: $(DEV)
	.venv/bin/python -m pytest -m models tests/policies -s $(ARGS)

test-seeds: $(DEV)
	.venv/bin/python -m grpo_rl.faults --seeds $(SEEDS) $(ARGS)

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

# Both run whatever comes of the first.
gpu-check: $(DEV)
	@status=0; \
	.venv/bin/python -m pytest -m gpu $$(grep -rl --include=*.py mark.gpu tests) || status=1; \
	.venv/bin/python benchmarks/gpu.py $(ARGS) || status=1; \
	exit $$status

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis

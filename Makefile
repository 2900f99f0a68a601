# Each command makes the environment it needs, in .venv, from the pinned requirements.
# PYTHON=/path/to/python sets the interpreter; without it launch/find_python.sh searches for one.

PY := .venv/bin/python
UV ?= uv
SEED ?= 0
ARGS ?=
# Two processes suit two cores and 16 GiB; each begins with half of the tests in their order.
PYTEST = -m pytest -n 2 --dist worksteal $(ARGS)
# They need no Ray and compile next to nothing.
FASTEST = tests/configs tests/rewards tests/pipeline/data tests/pipeline/evaluate tests/pipeline/rollout
# The slow tests check shapes and types of these at every call. Not programs.py: what it keeps in
# pytrees is sometimes abstract.
CHECK_SHAPES = --jaxtyping-packages=pipeline.compute.model,pipeline.compute.decode.cache,pipeline.compute.learner.losses,pipeline.compute.learner.topk,pipeline.data.packed_batch,pipeline.data.batching,pipeline.data.packing,beartype.beartype

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Installations into the same environment must not run in parallel.
.NOTPARALLEL:
# Stamps of pattern rules would be deleted as intermediate files.
.SECONDARY:
.PHONY: help demo gemma gemma-table demo-table deadline-table check test test-slow test-latest lint style format wheelhouse lock clean FORCE

help: ## show this
	@sed -n 's/^\([a-z0-9%-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | \
	    while IFS='|' read -r name what; do printf '  make %-15s %s\n' "$$name" "$$what"; done

demo: .venv/.runtime ## the main job on a tiny Gemma, a fresh run each time [SEED=n] [ARGS="--table.key VALUE"]
	$(PY) -m launch.train configs/demo.toml --run.seed $(SEED) \
	    --run.name demo-seed$(SEED)-$$(date +%Y%m%d-%H%M%S) $(ARGS)

gemma: .venv/.gemma ## a real Gemma 3 270m learns a task on two cores; downloads 255 MB [SEED=n] [ARGS]
	$(PY) -m launch.demo.gemma
	$(PY) -m launch.train configs/gemma3_270m_cpu.toml --run.seed $(SEED) \
	    --run.name gemma3-270m-seed$(SEED)-$$(date +%Y%m%d-%H%M%S) $(ARGS)

gemma-table: .venv/.gemma ## the same with seeds 0, 1, 2 and its control, as a table
	$(PY) -m launch.demo.gemma
	$(PY) -m launch.demo.table --config configs/gemma3_270m_cpu.toml $(ARGS)

demo-table: .venv/.runtime ## the demo with seeds 0, 1, 2 and its control, as a table
	$(PY) -m launch.demo.table $(ARGS)

deadline-table: .venv/.runtime ## the demo with the smallest time budget, twice and four times that, as a table
	$(PY) -m launch.demo.deadline_table $(ARGS)

# Types are checked beside the tests: without mypy's cache that takes minutes of one core.
test: style ## all checks: lint, types, layers, tests [ARGS="options of pytest"]
	@log=$$(mktemp); $(PY) -m mypy >$$log 2>&1 & types=$$!; \
	trap 'kill $$types 2>/dev/null; rm -f $$log' EXIT; trap 'exit 130' INT TERM; \
	$(PY) $(PYTEST); tests=$$?; \
	wait $$types; types_status=$$?; cat $$log; \
	[ $$tests -ne 0 ] && exit $$tests; exit $$types_status

test-slow: .venv/.dev ## the tests that take minutes, with the shapes of arrays checked [ARGS="options of pytest"]
	$(PY) $(PYTEST) $(CHECK_SHAPES) -m slow

# What is not committed; mypy's cache has the types of the rest.
check: style ## in three minutes: style, types of the changed files, the fastest tests
	{ git diff --name-only --diff-filter=d HEAD -- '*.py'; git ls-files --others --exclude-standard -- '*.py'; } \
	    | xargs -r $(PY) -m mypy
	$(PY) $(PYTEST) $(FASTEST)

test-latest: .venv-latest/.dev ## the tests on Python 3.12 with the newest allowed versions [ARGS]
	.venv-latest/bin/python $(PYTEST)

lint: style ## style, format, types, layers, known vulnerabilities of the requirements
	$(PY) -m mypy
	launch/audit.sh requirements-dev.txt requirements-cuda13.txt requirements-latest.txt

style: .venv/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	.venv/bin/lint-imports

format: .venv/.dev ## fix and format the sources
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

install-%: .venv/.% ## an environment for tpu, cuda13, gemma, rewards or dev
	@:

wheelhouse: ## an environment's wheels, for hosts without network; wheelhouse-tpu for a TPU's [PYTHON]
	launch/wheelhouse.sh requirements.txt

wheelhouse-%:
	launch/wheelhouse.sh requirements-$*.txt

lock: ## write the pinned requirements from pyproject.toml; needs uv [ARGS=--upgrade]
	@command -v $(UV) >/dev/null || { echo "make lock needs uv; name it with UV=/path/to/uv" >&2; exit 1; }
	$(LOCK) --extra dev -o requirements-dev.txt
	$(LOCK) -c requirements-dev.txt -o requirements.txt
	$(LOCK) -c requirements-dev.txt --extra rewards -o requirements-rewards.txt
	$(LOCK) -c requirements-dev.txt --extra gemma -o requirements-gemma.txt
	$(LOCK) -c requirements-dev.txt --extra mirror -o requirements-mirror.txt
	$(LOCK) -c requirements-dev.txt --extra tpu -o requirements-tpu.txt
	$(LOCK) -c requirements-dev.txt --extra cuda13 -o requirements-cuda13.txt
	$(COMPILE) --python-version 3.12 --upgrade --extra dev -o requirements-latest.txt

clean: ## remove the environments and all caches; runs stay
	rm -rf .venv .venv-latest .mypy_cache .ruff_cache .pytest_cache .test_cache .hypothesis \
	    .import_linter_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One file for all supported Python versions and platforms, without names of download hosts; the same
# versions for both Pythons where possible.
COMPILE = $(UV) pip compile pyproject.toml --universal --quiet \
    --no-emit-index-url --no-header --no-annotate
LOCK = $(COMPILE) --python-version 3.11 --fork-strategy fewest $(ARGS)
INSTALL = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-virtualenv

# A stamp is touched after a complete installation, so that an interrupted one is repeated.
.venv/.runtime: requirements.txt .venv/.python | .venv/.package
	@echo "Installing $< into .venv; the first time takes some minutes"
	@$(INSTALL) -r $<
	@touch $@

.venv/.%: requirements-%.txt .venv/.python | .venv/.package
	@echo "Installing $< into .venv; the first time takes some minutes"
	@$(INSTALL) -r $<
	@touch $@ .venv/.runtime

.venv-latest/.dev: requirements-latest.txt .venv-latest/.python | .venv-latest/.package
	@echo "Installing $< into .venv-latest; the first time takes some minutes"
	@$(INSTALL) -r $<
	@touch $@

# The project itself, from this folder: the command gemma-grpo.
.venv/.package .venv-latest/.package: %/.package: pyproject.toml %/.python
	@$(INSTALL) --no-deps --editable .
	@touch $@

# Checked every time, rewritten only for a new environment.
.venv/.python: FORCE
	@launch/make_venv.sh .venv

.venv-latest/.python: FORCE
	@launch/make_venv.sh .venv-latest 3.12

FORCE:

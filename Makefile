# Each command makes the environment it needs, in .venv, from the pinned requirements.
# PYTHON=/path/to/python sets the interpreter; without it launch/make_venv.sh searches for one.

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
.PHONY: help demo gemma gemma-table demo-table deadline-table check test test-slow test-accelerator test-latest lint audit style format wheelhouse wheelhouse-tpu wheelhouse-cuda13 lock clean FORCE

help: ## show this
	@sed -n 's/^\([a-z0-9%-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | \
	    while IFS='|' read -r name what; do printf '  make %-16s %s\n' "$$name" "$$what"; done

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

deadline-table: .venv/.runtime ## the demo with a time budget, twice and four times that, as tables [BUDGETS="2m 4m 8m"]
	for budget in $(or $(BUDGETS),2m 4m 8m); do $(PY) -m launch.demo.table --budget.steps none --budget.time $$budget \
	    --learner.schedule cosine --rollout.min_prompts_per_step 8 --eval.every_steps 10 $(ARGS) || exit; done

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

# Without prerequisites: the environment is that of this host's accelerator. The method of the time
# limit also ends a process that hangs in a call of a device.
test-accelerator: ## this host's TPU or GPU against the CPU, in some minutes [ARGS="--json FILE" or --cpu]
	$(PY) -m pytest --confcutdir tests/accelerator -m accelerator -o filterwarnings=ignore -p no:cacheprovider \
	    --timeout-method thread tests/accelerator $(ARGS)

test-latest: .venv-latest/.dev ## the tests on Python 3.12 with the newest allowed versions; needs uv [ARGS]
	.venv-latest/bin/python $(PYTEST)

lint: style ## style, format, types, layers
	$(PY) -m mypy

audit: .venv/.dev ## known vulnerabilities of the requirements, at osv.dev
	$(PY) -m pip_audit --vulnerability-service osv --no-deps --disable-pip --progress-spinner off \
	    -r requirements-dev.txt -r requirements-cuda13.txt

style: .venv/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	.venv/bin/lint-imports

format: .venv/.dev ## fix and format the sources
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

install-%: .venv/.% ## the environment for tpu, cuda13 or dev; or to it gemma, rewards or mirror
	@:

wheelhouse: ## an environment's wheels, for hosts without network; wheelhouse-tpu for a TPU's [PYTHON]
wheelhouse wheelhouse-tpu wheelhouse-cuda13: .venv-wheelhouse/.python
	@echo "Filling wheelhouse/ for $$(cat $<); the first time takes some minutes"
	@.venv-wheelhouse/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
	    --wheel-dir wheelhouse --requirement $(@:wheelhouse%=requirements%).txt "setuptools>=77"
	@echo "Copy the project's folder with wheelhouse/ to the other host, and call there:" \
	    "launch/bootstrap.sh --wheels wheelhouse"

lock: ## write the pinned requirements from pyproject.toml; needs uv [ARGS=--upgrade]
	@$(NEEDS_UV)
	$(LOCK) --extra dev -o requirements-dev.txt
	$(LOCK) -c requirements-dev.txt -o requirements.txt
	$(LOCK) -c requirements-dev.txt --extra tpu -o requirements-tpu.txt
	$(LOCK) -c requirements-dev.txt --extra cuda13 -o requirements-cuda13.txt

clean: ## remove the environments and all caches; runs stay
	rm -rf .venv .venv-latest .venv-wheelhouse .mypy_cache .ruff_cache .pytest_cache .test_cache .hypothesis \
	    .import_linter_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One file for all supported Python versions, without names of download hosts; the same versions for
# both Pythons where possible.
LOCK = $(UV) pip compile pyproject.toml --universal --quiet --no-emit-index-url --no-header \
    --no-annotate --python-version 3.11 --fork-strategy fewest $(ARGS)
NEEDS_UV = command -v $(UV) >/dev/null || { echo "this needs uv; name it with UV=/path/to/uv" >&2; exit 1; }
INSTALL = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-virtualenv

# A stamp is touched after a complete installation, so that an interrupted one is repeated.
.venv/.runtime: requirements.txt .venv/.python | .venv/.package
	@echo "Installing $< into .venv; the first time takes some minutes"
	@$(INSTALL) -r $<
	@touch $@

.venv/.dev .venv/.tpu .venv/.cuda13: .venv/.%: requirements-%.txt .venv/.python | .venv/.package
	@echo "Installing $< into .venv; the first time takes some minutes"
	@$(INSTALL) -r $<
	@touch $@ .venv/.runtime

# Optional packages, of which requirements-dev.txt has the versions.
.venv/.gemma .venv/.rewards .venv/.mirror: .venv/.%: requirements-dev.txt .venv/.python | .venv/.runtime
	@$(INSTALL) -c $< --editable '.[$*]'
	@touch $@

# Compiled as pip does: a warning of a package while it is compiled would be an error of a test.
.venv-latest/.dev: pyproject.toml .venv-latest/.python
	@echo "Installing the newest allowed versions into .venv-latest; that takes some minutes"
	@$(NEEDS_UV)
	@$(UV) pip install --quiet --compile-bytecode --python $(@D)/bin/python --upgrade --editable '.[dev]'
	@touch $@

# The project itself, from this folder: the command gemma-grpo.
.venv/.package: pyproject.toml .venv/.python
	@$(INSTALL) --no-deps --editable .
	@touch $@

# Checked every time, rewritten only for a new environment.
.venv/.python .venv-wheelhouse/.python: FORCE
	@launch/make_venv.sh $(@D)

.venv-latest/.python: FORCE
	@launch/make_venv.sh $(@D) 3.12

FORCE:

# Every target does its own set-up: a machine needs Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart test gate test-thorough check checks docs netlab gpu bench setup postgres chromium
.PHONY: launch launch-torch launch-bridge launch-oracle release-check

SPELLING = $(BIN)/codespell README.md SKILL.md CHANGELOG.md docs --skip '*.svg,*.json,*.toml'

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt torch --editable '.[dev]'
	touch $@

postgres:
	@bash tests/install_postgresql.sh

chromium:
	@bash tests/install_chromium.sh

# Runtimes whose own checks judge plans, in an environment of their own.
launch: $(READY)
	@bash tests/launch/install.sh

# N free plans of drawn questions, put through the runtimes' own checks.
launch-oracle: launch launch-torch launch-bridge
	$(BIN)/python -m tests.launch --draws $(or $(N),200) $(foreach target,$(TARGETS),--target $(target))

# Judges of torchtitan and DeepSpeed; about 250 MB.
launch-torch: $(READY)
	@bash tests/launch/install_torch.sh

# The judge of Megatron-Bridge 0.4 to 0.6, whose sources it does not bring; about 280 MB.
launch-bridge: $(READY)
	@bash tests/launch/install_bridge.sh

# LAB=1 adds two ranks joined by a limited wire; as root.
quickstart: $(READY)
	$(BIN)/python -m examples.quickstart $(if $(LAB),--lab)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

docs: $(READY)
	$(SPELLING)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'open site/index.html; to search: $(BIN)/python -m http.server --directory site'

# Four workers, because most tests wait; a file's tests share what they started. Workers and the
# hundreds of processes that tests start keep what Python compiled.
PURE := moetune/domain/*,moetune/fit/*,moetune/solve/*
BY_FILE := --dist loadfile --no-loadscope-reorder
COMPILED := $(VENV)/.compiled
unexport PYTHONDONTWRITEBYTECODE
test: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 check gate

# Once, and while the linters run: four workers that begin together compile much of it each.
$(COMPILED): $(READY)
	$(BIN)/python -c 'import transformers.models.mixtral.modeling_mixtral'
	touch $@

gate: $(COMPILED)
	$(BIN)/pytest -n 4 $(BY_FILE)

# Every line of what is computed is run, and nine of ten of all others, not counting ranks, which
# are processes of their own.
test-thorough: $(READY) postgres chromium launch
	@echo 'adds to `make test`: PostgreSQL, browsers, hostile clients, spelling, pages that train, measuring'
	@echo 'sessions, random worlds, the rest of their cases, and the coverage of lines'
	$(SPELLING)
	$(BIN)/pytest -n 4 $(BY_FILE) -m 'not gpu' --cov --cov-context=test --cov-report=
	$(BIN)/coverage report --include='$(PURE)' --fail-under=100
	$(BIN)/coverage report --fail-under=90 --format=total

# The laboratory and the reports of the benchmarks: their own faults, and none of the product's.
checks: $(READY)
	$(BIN)/pytest benchmarks/checks

# Built, installed, upgraded and removed as a stranger would. TORCH=1 adds torch, FROM=COMMIT a
# database of that version.
release-check:
	@TORCH=$(TORCH) FROM=$(FROM) bash tests/release.sh

netlab: $(READY)
	$(BIN)/python -m benchmarks.netlab

bench: $(READY)
	$(BIN)/python -m benchmarks.pipemoe
	$(BIN)/python -m benchmarks.speed
	$(BIN)/python -m benchmarks.ppmoe.table2

gpu:
	python3 -m benchmarks.gpu

# `make serve` and `make test` do all their own set-up; the rest is for developers.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
  $$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: serve test fast lint protos bench clean

serve: $(VENV)/.installed
	$(BIN)/cidery serve $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(ARGS)

# Everything but the tests that start a fleet.
fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not ray" $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint

protos: $(VENV)/.installed-dev
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
	  $(shell find protos -name '*.proto' | sort)

bench: $(VENV)/.installed-dev
	$(BIN)/python -m tests.bench.bench_serve $(ARGS)

clean:
	rm -rf $(VENV)

$(VENV)/.created:
	@$(PYTHON) -c '$(SUPPORTED)' 2>/dev/null \
	  || { echo "cidery needs Python 3.11, 3.12 or 3.13 on PATH, or PYTHON=/path/to/one"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	@echo "installing cidery into $(VENV): a few minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@$(BIN)/python -m worker.blas
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

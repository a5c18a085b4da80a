# make serve: from a fresh machine to a running server. make test: the tests, one process a core, but
# for those marked slow; make test-slow: these.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup serve test test-slow lint types imports proto proto-check check

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

serve: setup
	$(BIN)/foretoken serve $(ARGS)

test: setup
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal -m "not slow" $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal -m slow $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

# The generated code is committed; proto-check fails when regenerating would change it.
proto: setup
	PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I . \
	  --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. protos/*.proto

proto-check: proto
	git diff --exit-code -- protos
	test -z "$$(git ls-files --others --exclude-standard -- protos)"

check: lint types imports proto-check

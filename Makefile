# make serve: install and start the server
# make test: tests that are not marked slow, one process per core; property tests use fixed seeds
# make test-slow: tests marked slow, except property tests
# make soak: property tests with fresh seeds; EXAMPLES=sample draws fewer, as CI does
# make faults: processes and connections fail for an hour under load
# make lock, make audit, make sbom: the packages of the container (needs PyPI)
# make test-clients: third-party clients against a live server, at pinned versions in separate
# environments (about 9 GB, created by make clients)
PYTHON ?= python3
EXAMPLES ?= fresh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DASHBOARDS := 'observability/grafana/*.json' 'observability/prometheus/*.yml'

.PHONY: setup serve test test-slow soak faults clients test-clients lint types imports proto proto-check
.PHONY: lock audit sbom
.PHONY: metrics metrics-check dashboards dashboards-check docs docs-pages docs-check docs-serve check

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

serve: setup
	$(BIN)/foretoken serve $(ARGS)

test: setup
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal -m "not slow and not clients" $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal -m "slow and not property and not clients" $(ARGS)

# A failure prints the @reproduce_failure line that repeats it.
soak: setup
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal --hypothesis-profile $(EXAMPLES) -m "property and not clients" $(ARGS)

# Fails if an answer is lost or wrong.
faults: setup
	$(BIN)/python -m tests.faults --seconds 3600 --requests 1000000 $(ARGS)

clients: setup
	$(BIN)/python -m tests.clients.environments

# Not in parallel: the tests measure times and share one server.
test-clients: clients
	$(BIN)/python -m pytest -m clients $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

# Generated files are committed. Each *-check target regenerates its files and fails if one changes.
proto: setup
	PATH="$(BIN):$$PATH" $(BIN)/python -m protos.generate

proto-check: proto
	git diff --exit-code -- protos
	test -z "$$(git ls-files --others --exclude-standard -- protos)"

# The reference page of all metrics, from the catalogue.
metrics: setup
	$(BIN)/python -m observability.catalogue_page

metrics-check: metrics
	git diff --exit-code -- observability/METRICS.md

# Grafana dashboards and Prometheus rules.
dashboards: setup
	$(BIN)/python -m observability.grafana.build
	$(BIN)/python -m observability.prometheus.build

dashboards-check: dashboards
	git diff --exit-code -- $(DASHBOARDS)
	test -z "$$(git ls-files --others --exclude-standard -- $(DASHBOARDS))"

# Documentation pages generated from code: settings, presets and request fields.
docs-pages: setup
	$(BIN)/python docs/generate.py
	$(BIN)/python -m gateway.faces.http.dialect.page

docs-check: docs-pages
	git diff --exit-code -- docs
	test -z "$$(git ls-files --others --exclude-standard -- docs)"

docs: docs-check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# The packages of the container: pinned with hashes, searched for known vulnerabilities, listed.
RELEASE := $(VENV)-release

$(RELEASE)/.installed: pyproject.toml
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet uv pip-audit cyclonedx-bom
	touch $@

lock: $(RELEASE)/.installed
	$(RELEASE)/bin/uv pip compile pyproject.toml --universal --python-version 3.11 --upgrade --generate-hashes --no-header --no-annotate --quiet --output-file requirements.lock

# A package that the database of PyPI does not know fails the audit, too.
audit: $(RELEASE)/.installed
	$(RELEASE)/bin/pip-audit --strict --disable-pip --requirement requirements.lock

sbom: $(RELEASE)/.installed
	$(RELEASE)/bin/cyclonedx-py requirements requirements.lock --output-file sbom.json

docs-serve: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

check: lint types imports proto-check metrics-check dashboards-check docs

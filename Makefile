SHELL := /bin/bash
PY := .venv/bin/python
export OMP_NUM_THREADS := 1
ARGS ?=

.PHONY: setup demo test test-all check bench clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@test -x $(PY) || python3 -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,report,dev]'
	@touch $@

demo: setup
	.venv/bin/echo2 demo $(ARGS)

check: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PY) -m tests.file_length
	$(PY) -m pytest tests/unit/domain tests/unit/p2p tests/unit/worker_node tests/unit/pricing -q \
	  --cov=coordinator.domain --cov=p2p.domain --cov=worker_node.domain --cov=pricing --cov-branch \
	  --cov-report=term-missing:skip-covered --cov-fail-under=100

test: setup
	$(PY) -m pytest tests $(ARGS)

test-all: setup
	$(PY) -m pytest tests --long $(ARGS)

bench: setup
	$(PY) -m tests.bench $(ARGS)

clean:
	rm -rf .venv build dist echo2-demo

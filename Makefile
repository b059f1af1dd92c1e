# Everything sets itself up: a .venv with what it needs, made once and again when it changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Most of a run is waiting for processes: two at a time, a file of tests never split.
TOGETHER := --numprocesses 2 --dist loadfile

.PHONY: demo test quick bench lint tools bench-tools bytecode clean

# Programs and the packages they come in, installed as root where they are missing.
install_tools = for pair in $(1); do \
		command -v $${pair%%:*} >/dev/null || test "$$(id -u)" != 0 || \
		{ apt-get update -qq && apt-get install -qq -y --no-install-recommends $${pair\#\#*:}; } >/dev/null || \
		echo "$${pair%%:*} could not be installed"; \
	done

demo: $(VENV)/installed bytecode
	$(BIN)/weighlock demo

test: $(VENV)/tests-installed tools lint bytecode
	$(BIN)/python -m pytest $(TOGETHER)
	$(BIN)/python -m benchmarks --quick

quick: $(VENV)/tests-installed lint bytecode
	$(BIN)/python -m pytest $(TOGETHER) -m "not slow and not root and not memory"

bench: bench-tools
	$(PYTHON) -m benchmarks --output benchmarks/RESULTS.md
	$(PYTHON) -m benchmarks.pictures

# Crash tests inject faults with strace, transfers are tried behind nginx, the page in chromium;
# without them they are skipped and say so.
tools:
	@$(call install_tools,strace:strace nginx:nginx chromedriver:chromium-driver)

# Peers that are programs, and what a long line is made of; without them the tables say so.
bench-tools:
	@$(call install_tools,nginx:nginx curl:curl openssl:openssl ip:iproute2 unshare:util-linux)

# pip compiles what it installs, but not what it installs as editable: where PYTHONDONTWRITEBYTECODE
# is set, every process would compile it anew, which takes longer than all it imports.
bytecode: $(VENV)/installed
	@$(BIN)/python -m compileall -q src

lint: $(VENV)/tests-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Installing compiles the arithmetic of means, if there is a compiler.
$(VENV)/installed: pyproject.toml hatch_build.py src/weighlock/combining/compiled.c | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable .
	touch $@

# torch is pinned: any other version pulls gigabytes of CUDA packages.
$(VENV)/tests-installed: pyproject.toml tests/requirements.txt | $(VENV)/installed
	$(BIN)/pip install --quiet --requirement tests/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) .bench-venv src/weighlock/combining/*.so .pytest_cache .mypy_cache .ruff_cache

# `make demo` and `make test` set everything up on a fresh machine: they need Python >= 3.11 only.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
# threads of one process: tests run in one process per core, and on a busy machine two threads are
# many times slower than one
THREADS := OMP_NUM_THREADS=1

.PHONY: setup demo test test-all lint docs bench clean

setup: $(READY)

# the core and the tasks of the demo
$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "rabo needs Python 3.11 or newer"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[tasks]'
	touch $@

# all extras and the tools of the developers
$(READY): $(DEMO)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(DEMO)
	$(THREADS) $(BIN)/rabo demo

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-logo

test: $(READY)
	$(THREADS) $(BIN)/pytest -m "not slow" --numprocesses 2 --dist loadgroup --durations 10

test-all: $(READY)
	$(THREADS) $(BIN)/pytest --numprocesses 2 --dist loadgroup --durations 25 \
		--hypothesis-profile thorough --cov rabo --cov-report=
	$(BIN)/python tests/coverage_by_room.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'open site/index.html; its search needs a server: $(BIN)/mkdocs serve'

bench: $(READY)
	$(THREADS) $(BIN)/python -m benchmarks all

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis site dist

# Two commands, each alone on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
.PHONY: demo test test-all check format setup docs clean

demo: .venv/installed
	$(BIN)/memtrain demo

test: .venv/dev
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not slow and not gpu"

test-all: .venv/dev
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not gpu"

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: .venv/dev
	$(BIN)/pre-commit install

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

docs: .venv/dev
	$(BIN)/sphinx-build -W --keep-going docs build/docs

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis

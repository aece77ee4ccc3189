# make run    set up and run the main job        make test    set up, lint, and run the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal

.PHONY: run test lint test-slow test-faults clean

run: $(VENV)/run
	$(BIN)/rota run fedavg-digits

test: lint
	$(PYTEST)

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-slow: $(VENV)/dev
	$(PYTEST) -m slow

test-faults: $(VENV)/dev
	$(PYTEST) -m faults

# the constraints pin every version; torch is named in them so that pip takes exactly that build
$(VENV)/run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/dev: $(VENV)/run
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

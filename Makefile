# make run    set up and run the main job        make test    set up, lint, and run the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal

.PHONY: run test lint docs test-slow test-native-sanitized test-faults clean

run: $(VENV)/run
	$(BIN)/rota run fedavg-digits

test: lint
	$(PYTEST)

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the documentation site in build/site; a link that leads nowhere fails it
docs: $(VENV)/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

test-slow: $(VENV)/dev test-native-sanitized
	$(PYTEST) -m slow

# The C library under AddressSanitizer and UndefinedBehaviorSanitizer, which end the process at the
# first error. AddressSanitizer must be loaded first. It needs libstdc++, with which Python is not
# linked, and would report what Python does not free at its end as leaks.
test-native-sanitized: $(VENV)/dev
	CC=gcc ROTA_SANITIZE=1 ROTA_CASES=1000 \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
	$(PYTEST) --capture=sys tests/test_native*.py

test-faults: $(VENV)/dev
	$(PYTEST) -m faults

# the constraints pin every version; torch is named in them so that pip takes exactly that build
$(VENV)/run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/dev: $(VENV)/run
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,flower,ui,track,lora,ray,docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

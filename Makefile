# Two commands do everything on a machine with Python 3.11 and this clone: make demo, make test.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# `make test COVERAGE=yes` measures coverage too, which costs about 45% more CPU time on Python 3.11.
COVERAGE ?=

.PHONY: demo test speed lint docs dist-check lower-bounds clean

# Made again only when what is asked for changes: for users, and for those who change the code.
$(VENV)/.users: EXTRAS := all
$(VENV)/.installed: EXTRAS := all,energy,lightning,transformers,dev,docs
$(VENV)/.users $(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'dsa_hw needs Python 3.11 or newer: make PYTHON=python3.11 ...')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

demo: $(VENV)/.users
	$(BIN)/dsa-hw demo

# One worker per core with one thread each: more threads than cores wait for each other.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal \
		$(if $(COVERAGE),--cov --cov-report=term:skip-covered)

# Tests that assert a time, one after the other; they need a quiet machine.
speed: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m speed

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

dist-check: $(VENV)/.installed
	.ci/wheel-smoke $(VENV)

# The fast tests with the oldest dependencies that pyproject.toml allows, in an environment of their own.
lower-bounds:
	PYTHON=$(PYTHON) .ci/lower-bounds

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-lower-bounds build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage site

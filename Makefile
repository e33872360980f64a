# The commands of the project; CI runs the same ones. Everything is set up on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help install serve test test-slow test-gpu coverage bench lint format clean

help:  ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed  ## Make .venv with everything for work on the project.

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[cpu,dev]'
	touch $@

# Its own environment: what serving needs and nothing more, so no torch.
SERVING := .venv-serving

$(SERVING)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/pip install --quiet --constraint constraints.txt --editable '.[cpu]'
	touch $@

serve: $(SERVING)/.installed  ## Serve the models that come with the project on port 8000.
	$(SERVING)/bin/cloze serve

lint: install  ## ruff, mypy --strict, import-linter.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Some tests read real text from the folder that CLOZE_TEST_DATA names. Without it they skip.
test: lint  ## Lint and the whole suite, but for the slow proofs.
	$(BIN)/pytest

test-slow: install  ## The proofs that take minutes.
	$(BIN)/pytest -m slow

# Its own environment: the two builds of the runtime overwrite each other.
GPU := .venv-gpu

$(GPU)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/pip install --quiet --constraint constraints.txt --editable '.[gpu,dev]'
	touch $@

test-gpu: $(GPU)/.installed  ## The proofs that need a GPU.
	$(GPU)/bin/pytest -m gpu

# Measuring slows the suite, so each test gets more time. docs/coverage.md says what is not covered.
coverage: install  ## The suite with branch coverage, child processes included; fails below the threshold.
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --timeout 600
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

bench: install  ## Measure the default model: the engine alone and the server.
	$(BIN)/cloze bench run

format: install  ## Format the code.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove what the other commands made, but not the bundles.
	rm -rf $(VENV) $(SERVING) $(GPU) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.*

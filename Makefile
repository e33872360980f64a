# The commands of the project. CI runs the same commands. The first use of a command installs
# what the command needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help docs site install serve test-unit test simulate simulate-faults test-slow test-gpu mutants coverage audit-dependencies locks wheel chart bench lint format clean

# With an older Python, pip finds no version of some dependency, and does not say why.
define check-python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "Cloze needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.11 ..." >&2; exit 1; }
endef

help:  ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed  ## Create .venv with everything for work on the project.

$(VENV)/.installed: pyproject.toml client/pyproject.toml constraints.txt
	$(check-python)
	$(PYTHON) -m venv $(VENV)
	@echo 'Installing the development environment; this takes four to nine minutes.'
	$(BIN)/pip install --constraint constraints.txt --editable ./client --editable '.[cpu,dev]'
	touch $@

# A separate environment with only what serving and the client need, so without torch.
SERVING := .venv-serving

$(SERVING)/.installed: pyproject.toml client/pyproject.toml constraints.txt
	$(check-python)
	$(PYTHON) -m venv $(SERVING)
	@echo 'Installing the serving environment; this takes one to three minutes.'
	$(SERVING)/bin/pip install --constraint constraints.txt --editable ./client --editable '.[cpu]'
	touch $@

serve: $(SERVING)/.installed  ## Serve the models of the project on port 8000.
	$(SERVING)/bin/cloze serve

lint: install  ## Run ruff, mypy --strict, import-linter, codespell and the budgets of lines and paths.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python scripts/line-budgets
	$(BIN)/python scripts/path-budgets

# Some tests read real text from the directory that CLOZE_TEST_DATA names. Without the variable,
# these tests skip. Three files run side by side, since many tests wait for servers. The servers
# start sooner with compiled modules, also where the environment forbids to write them. The tests that
# fork come first: a fork of a process in which other tests have left threads may hang.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n 3 --dist loadfile
FORKING := tests/unit/service/processes

test-unit: install  ## Run the unit tests: what one module promises, without a server.
	$(PYTEST) $(FORKING)
	$(PYTEST) -n 2 --ignore=$(FORKING) tests/unit

test: lint  ## Run the linters and all tests except the slow ones.
	$(PYTEST) $(FORKING)
	$(PYTEST) --ignore=$(FORKING)

# For example: make simulate SEEDS=1-2000
simulate: install  ## Play the histories of SEEDS in simulated time; print the shortest that fails.
	$(BIN)/python -m tests.support.world --seeds $(or $(SEEDS),1-200)

# It takes minutes of one core. For example: make simulate-faults FAULTS=adapter
simulate-faults: install  ## Put faults of the past back, and play histories until each is found.
	$(BIN)/python -m tests.support.world.past_faults --only "$(FAULTS)"

test-slow: install  ## Run the tests that take minutes.
	$(PYTEST) -m slow --no-loadscope-reorder

# A separate environment, because the two builds of onnxruntime overwrite each other.
GPU := .venv-gpu

$(GPU)/.installed: pyproject.toml client/pyproject.toml constraints.txt
	$(check-python)
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/pip install --constraint constraints.txt --editable ./client --editable '.[gpu,dev]'
	touch $@

test-gpu: $(GPU)/.installed  ## Run the tests that need a GPU.
	$(GPU)/bin/pytest -m gpu

# For example: make mutants MODULE=service/tasks OPTIONS='--size 100 --seed 2'
mutants: install  ## Put faults into MODULE, one at a time; list those that its tests miss.
	@test -n '$(MODULE)' || { echo 'name a folder or a file: make mutants MODULE=service/tasks'; exit 2; }
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ./client --editable '.[mutants]'
	$(BIN)/python -m tests.mutants $(OPTIONS) $(MODULE)

# Coverage slows the tests, so each test gets more time. CONTRIBUTING.md says what is not covered.
coverage: install  ## Run the tests with branch coverage; fail below the threshold.
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --timeout 600
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# scripts/audit-dependencies has the exit codes. make prints the code, and itself ends with 2 on any failure.
audit-dependencies: install  ## Compare the pinned versions with published vulnerabilities; needs a network.
	$(BIN)/python scripts/audit-dependencies

locks: install  ## Write locks/, what the images install; needs the package index.
	$(BIN)/python scripts/lock-images

wheel: install  ## Build wheels and source distributions of server and client in dist/.
	$(BIN)/hatchling build --directory dist
	cd client && ../$(BIN)/hatchling build --directory ../dist

chart: install  ## Write a Helm chart of k8s/ into build/chart; needs kubectl.
	$(BIN)/python scripts/make-chart build/chart

bench: install  ## Measure the default model: the engine alone and the server.
	$(BIN)/cloze bench run

docs: install  ## Renew the generated documents.
	$(BIN)/python scripts/tensor-reference
	$(BIN)/python scripts/route-reference
	$(BIN)/python scripts/family-reference
	$(BIN)/python scripts/command-reference

site: install  ## Build the documentation site in build/site.
	$(BIN)/python scripts/build-site

format: install  ## Format the code.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove what the other commands created, except the bundles.
	rm -rf $(VENV) $(SERVING) $(GPU) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.*

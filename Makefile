# make certify: own venv, install, certify what this machine can. make test: own venv, install, lint, tests. Both can be run again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# one family of each kind that is quick without a GPU: exact, healed by liveness, refused
SCREENED := --zoo libreyolo --family fomo --family yolo9 --family ppyoloe

.PHONY: venv certify test lint clean
venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[all]'
	touch $@

certify: venv
	$(BIN)/parity certify --zoo libreyolo --resume

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest tests
	$(BIN)/python -m pytest parity/ --engine emulated $(SCREENED)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

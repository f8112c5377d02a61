# Every target sets itself up: it makes .venv with a Python >= 3.12 and installs what it needs.
PYTHON_VENV := .venv/bin/python

.PHONY: setup demo demo-recsys test test-all lint

setup:
	@tools/setup.sh dev

demo:
	@tools/setup.sh demo
	@$(PYTHON_VENV) -m experiments.demo

demo-recsys:
	@tools/setup.sh demo
	@$(PYTHON_VENV) -m experiments.demo_recsys

lint: setup
	@$(PYTHON_VENV) -m ruff format --check .
	@$(PYTHON_VENV) -m ruff check .
	@$(PYTHON_VENV) -m mypy

test: lint
	@$(PYTHON_VENV) -m pytest -n auto --dist worksteal -m "not slow and not gpu"

test-all: lint
	@$(PYTHON_VENV) -m pytest -n auto --dist worksteal -m "not gpu"

# Everything is set up by the targets themselves: only Python 3.11+, git and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo test lint figures clean

install: $(VENV)/.compiled

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.compiled: $(VENV)/.installed
	$(BIN)/python -c 'from online.on_demand import compile_all; compile_all()'
	touch $@

demo: install
	$(BIN)/belady diff resnet50 --budget 0.7 --budget 0.5 --execute --plot out/demo.png --json out/demo.jsonl

# Compiling and checking types take a minute and a half each, on one core.
test:
	$(MAKE) --jobs 2 install lint
	$(BIN)/python -m pytest -n auto

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What is drawn from committed rows, and the README's picture, which is of schedules and so is computed anew.
figures: install
	$(BIN)/python -m belady.readme_tables
	$(BIN)/python -m belady.online_doc
	$(BIN)/python -m belady.methods_doc
	$(BIN)/python -m belady.gpu_doc
	$(BIN)/belady diff resnet50 --budget 0.9 --budget 0.8 --budget 0.7 --budget 0.6 --budget 0.5 --heuristic demand --heuristic dtr --plot docs/demo.png

clean:
	rm -rf $(VENV) build out *.egg-info

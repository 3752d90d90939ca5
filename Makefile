# Everything runs in a virtual environment of its own, with the versions of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
RANKS ?= 2
ARGS ?=
INSTALLED = $(VENV)/.installed

.PHONY: train test lint bench clean

train: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node $(RANKS) -m examples.train $(ARGS)

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(INSTALLED)
	$(VENV)/bin/python -m benchmarks.overlap $(ARGS)
	$(VENV)/bin/python -m benchmarks.first_light
	$(VENV)/bin/python -m benchmarks.wrapping

$(INSTALLED): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) out

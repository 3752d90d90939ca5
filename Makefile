# Everything runs in a virtual environment of its own, with the versions and hashes of constraints.txt. Another torch has
# another environment: make test TORCH=2.15.0
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED)
PYTHON ?= python3
VENV ?= .venv$(if $(filter-out $(PINNED),$(TORCH)),-torch$(TORCH))
CUDA_TORCH = 2.15.0
RANKS ?= 2
# The tests of one file run in one process, which starts its ranks once. When a process dies, the tests end: pytest-xdist
# would wait for ever for some of those that the process still had to run.
XDIST = -n 2 --max-worker-restart 0
PYTEST = $(VENV)/bin/python -m pytest $(XDIST) --dist loadfile
ARGS ?=
INSTALLED = $(VENV)/.installed
# Another torch brings its own Triton.
WITHOUT = $(if $(filter-out $(PINNED),$(TORCH)),/^triton==/d; )

.PHONY: train test test-all test-gpu-structure gpu-structure soak lint bench docs clean

train: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node $(RANKS) -m examples.train $(ARGS)

test: $(INSTALLED)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(INSTALLED)
	$(PYTEST) $(ARGS)

# What compiled steps ask of a GPU, on a GPU that does nothing: needs a torch that is built for CUDA, gcc, and no GPU.
test-gpu-structure:
	$(MAKE) gpu-structure TORCH=$(CUDA_TORCH)

gpu-structure: $(INSTALLED)
	TRITON_CACHE_DIR=$(abspath $(VENV))/triton TORCHINDUCTOR_CACHE_DIR=$(abspath $(VENV))/inductor \
	$(VENV)/bin/python -m simplefsdp.null_gpu -m pytest tests/null_gpu $(XDIST) --dist loadgroup --no-loadscope-reorder $(ARGS)

# The campaigns of RELIABILITY.md: three hours. ARGS="death --runs 10" runs a part of one.
soak: $(INSTALLED)
	$(VENV)/bin/python -m tests.soak $(ARGS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(INSTALLED)
	$(VENV)/bin/python -m benchmarks.overlap $(ARGS)
	$(VENV)/bin/python -m benchmarks.budget
	$(VENV)/bin/python -m benchmarks.planning
	$(VENV)/bin/python -m benchmarks.reports
	$(VENV)/bin/python -m benchmarks.accumulation
	$(VENV)/bin/python -m benchmarks.after_backward
	$(VENV)/bin/python -m benchmarks.first_light
	$(VENV)/bin/python -m benchmarks.wrapping

# The pages of docs/ as a site in out/docs. Nothing is downloaded but the tools, once.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

$(INSTALLED): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed '$(WITHOUT)s/^torch==.*/torch==$(TORCH)/; s/ --hash=.*//' constraints.txt > $(VENV)/constraints.txt
	sed -n '$(WITHOUT)/ --hash=/p' constraints.txt > $(VENV)/hashed.txt
	$(VENV)/bin/pip install --quiet --no-deps --require-hashes --requirement $(VENV)/hashed.txt
	$(VENV)/bin/pip install --quiet --no-build-isolation --constraint $(VENV)/constraints.txt --editable '.[dev,docs]'
	touch $@

clean:
	rm -rf .venv* out

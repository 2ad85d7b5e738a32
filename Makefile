# Every command installs what it needs into $(VENV) first: Python 3.10 or newer and make are enough.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OLDEST_TRITON := 3.6.0

# Two processes of one thread each. Triton's interpreter multiplies small matrices, which more threads only slow down.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n 2

.PHONY: help demo test test-oldest-triton lint types bench

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile | expand -t 26

demo: $(VENV)/.demo ## encode two photographs with random weights, into demo/
	$(BIN)/ernie-vit encode $$($(BIN)/python -m ernie_vit.samples) \
		--max-pixels 200704 --out demo/tokens.safetensors --picture demo/tokens.png

test: $(VENV)/.dev ## run every test that this machine can run
	$(PYTEST) -m 'not gpu and not interpreter'
	$(BIN)/pytest -m gpu -r fE
	TRITON_INTERPRET=1 $(PYTEST) -m interpreter

test-oldest-triton: build/triton-$(OLDEST_TRITON) ## run the kernel tests with the oldest Triton supported
	PYTHONPATH=build/triton-$(OLDEST_TRITON) $(PYTEST) -m compile
	PYTHONPATH=build/triton-$(OLDEST_TRITON) TRITON_INTERPRET=1 $(PYTEST) -m interpreter

lint: $(VENV)/.dev ## check style
	$(BIN)/ruff check .

types: $(VENV)/.dev ## check types
	rm -rf build/types && mkdir -p build/types/ernie_vit
	ln -s "$(CURDIR)"/ernie_vit/*.py "$(CURDIR)"/kernels "$(CURDIR)"/model "$(CURDIR)"/graph build/types/ernie_vit
	$(BIN)/mypy

bench: $(VENV)/.dev ## measure the kernels on this machine's GPU
	$(BIN)/pytest bench

$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: setup.py constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

build/triton-%: | $(VENV)/.dev
	$(BIN)/pip install --no-deps --target $@ triton==$*

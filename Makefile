# Every command installs what it needs into $(VENV) first: Python 3.10 or newer and make are enough.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OLDEST_TRITON := 3.6.0
# The other release whose Gluon kernels are used; it comes with vLLM 0.33.
GLUON_TRITON := 3.8.0
# The newest vLLM that the plugin knows, and one from before vLLM had encoder graphs for ERNIE-4.5-VL (0.28).
VLLM := 0.33.0
EARLIER_VLLM := 0.26.0

# Two processes of one thread each. Triton's interpreter multiplies small matrices, which more threads only slow down.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n 2
VLLM_PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 build/vllm/bin/pytest -n 2 --dist loadfile tests/vllm_plugin

.PHONY: help demo test test-oldest-triton test-gluon-triton test-vllm lint types bench

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile | expand -t 26

demo: $(VENV)/.demo ## encode two photographs with random weights, into demo/
	$(BIN)/ernie-vit encode $$($(BIN)/python -m ernie_vit.samples) \
		--max-pixels 200704 --out demo/tokens.safetensors --picture demo/tokens.png

test: $(VENV)/.dev ## run every test that this machine can run
	$(PYTEST) -m 'not gpu and not interpreter'
	$(BIN)/pytest -m gpu -r fE
	TRITON_INTERPRET=1 $(PYTEST) -m interpreter

test-oldest-triton: build/triton-$(OLDEST_TRITON) ## compile the kernels with the oldest Triton supported
	PYTHONPATH=build/triton-$(OLDEST_TRITON) $(PYTEST) -m compile

test-gluon-triton: build/triton-$(GLUON_TRITON) ## compile the Gluon kernels with the newest Triton that they are used with
	PYTHONPATH=build/triton-$(GLUON_TRITON) $(PYTEST) -m gluon

test-vllm: build/vllm/.ready build/vllm-$(EARLIER_VLLM) ## run the plugin's tests inside two releases of vLLM, on the CPU
	$(VLLM_PYTEST)
	build/vllm/bin/pytest tests/bench/test_vllm_tower.py
	TRITON_INTERPRET=1 $(VLLM_PYTEST) -m interpreter
	PYTHONPATH=build/vllm-$(EARLIER_VLLM) $(VLLM_PYTEST)

lint: $(VENV)/.dev ## check style
	$(BIN)/ruff check .

types: $(VENV)/.dev ## check types
	rm -rf build/types && mkdir -p build/types/ernie_vit
	ln -s "$(CURDIR)"/ernie_vit/*.py "$(CURDIR)"/kernels "$(CURDIR)"/model "$(CURDIR)"/graph build/types/ernie_vit
	$(BIN)/mypy

bench: $(VENV)/.dev ## measure encoder and kernels on this machine's GPU (a minute: make bench BENCH=--quick)
	$(BIN)/python -m bench run $(BENCH)

$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: setup.py constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

build/triton-%: | $(VENV)/.dev
	$(BIN)/pip install --no-deps --target $@ triton==$*

# An environment of its own, 3 GB: vLLM's wheel without its extensions and without what it asks for.
build/vllm/.ready: tests/vllm_plugin/requirements.txt setup.py
	test -x build/vllm/bin/pip || $(PYTHON) -m venv build/vllm
	build/vllm/bin/pip install --disable-pip-version-check -r tests/vllm_plugin/requirements.txt
	build/vllm/bin/pip install --no-deps vllm==$(VLLM) xgrammar==0.2.8 apache-tvm-ffi==0.1.11 -e .
	touch $@

build/vllm-%: | build/vllm/.ready
	build/vllm/bin/pip install --no-deps --target $@ vllm==$*

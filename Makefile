# `make test` and `make tune` do all their own set-up in .venv; nothing else is needed first.
#   make tune ARGS="--effort quick"      make test ARGS="-k lookup"      make test PYTHON=python3.12

ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
endif
BIN := .venv/bin

.PHONY: setup test tune lint types wheel

# Two at a time, the cores that this is held to; ARGS="-n 0" for one, as tests that time a GPU want it.
test: setup
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

# Measures on this machine's GPU; without one, predicts for the MI355X.
tune: setup
	$(BIN)/zyfa-tune --seq-lens 512..32k --out out $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy zyfa tuner tuning_db scripts

wheel: setup
	scripts/check_wheel.sh

setup:
	@test -n "$(PYTHON)" || { echo "ZYFA needs Python 3.11, 3.12 or 3.13 on the PATH (or PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) scripts/setup_env.py

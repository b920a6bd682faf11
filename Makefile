# Each target sets up what it needs in .venv; a second run is quick.
PYTHON ?= python3
BIN := .venv/bin
CSRC := $(shell find src/backends/policy_kernels/csrc -type f)
INSTALLED_FROM := pyproject.toml constraints.txt CMakeLists.txt $(CSRC)
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench wheel clean
# Two installations into one environment must not run at once.
.NOTPARALLEL:

demo: .venv/demo.stamp
	$(BIN)/policy-core demo

test: .venv/test.stamp
	$(BIN)/python -m pytest

lint: .venv/lint.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(filter %.h %.cc,$(CSRC))
	$(BIN)/codespell

bench: .venv/bench.stamp
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python -m pytest benchmarks --benchmark-enable --benchmark-only

wheel: .venv/lint.stamp
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv build dist

# Only the tests insist on the native kernels.
.venv/test.stamp: export POLICY_REQUIRE_KERNELS = 1

.venv/%.stamp: $(INSTALLED_FROM) | $(BIN)/python
	$(PIP_INSTALL) -e '.[$*]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv

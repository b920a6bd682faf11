# Each target sets up what it needs in .venv; a second run is quick.
PYTHON ?= python3
BIN := .venv/bin
CSRC := $(shell find src/backends/policy_kernels/csrc -type f)
INSTALLED_FROM := pyproject.toml constraints.txt CMakeLists.txt $(CSRC)
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench wheel test-neon clean
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

# Needs Debian's g++-aarch64-linux-gnu and qemu-user: cross-compiles the kernels and runs them there.
ARM := aarch64-linux-gnu
test-neon:
	cmake -S . -B build/neon -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux \
	  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_C_COMPILER=$(ARM)-gcc -DCMAKE_CXX_COMPILER=$(ARM)-g++
	cmake --build build/neon
	$(ARM)-g++ -std=c++17 -O2 -Wall -Wextra -I src/backends/policy_kernels/csrc \
	  tests/kernels/neon_check.cc build/neon/libpolicy_kernels.so -Wl,-rpath,$(CURDIR)/build/neon \
	  -o build/neon/neon_check
	qemu-aarch64 -cpu max -L /usr/$(ARM) build/neon/neon_check

clean:
	rm -rf .venv build dist

# Only the tests insist on the native kernels.
.venv/test.stamp: export POLICY_REQUIRE_KERNELS = 1

.venv/%.stamp: $(INSTALLED_FROM) | $(BIN)/python
	$(PIP_INSTALL) -e '.[$*]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv

# Each target sets up what it needs in .venv; a second run is quick.
PYTHON ?= python3
BIN := .venv/bin
CSRC := $(shell find src/backends/*/csrc -type f)
INSTALLED_FROM := pyproject.toml constraints.txt CMakeLists.txt $(CSRC)
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench wheel sanitize test-neon clean
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
	$(BIN)/clang-format --dry-run --Werror $(filter %.h %.cc,$(CSRC)) tests/kernels/check.cc
	$(BIN)/codespell

bench: .venv/bench.stamp
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python -m pytest benchmarks --benchmark-enable --benchmark-only
	$(BIN)/python benchmarks/kernels/bench_linear.py

wheel: .venv/lint.stamp
	$(BIN)/python -m build --wheel

# The kernel tests on a build with the address and undefined behaviour sanitizers (gcc's).
sanitize: .venv/test.stamp
	cmake -S . -B build/sanitize -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPK_SANITIZE=ON
	cmake --build build/sanitize
	LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1 \
	  POLICY_KERNELS_TEST_LIBRARY=build/sanitize \
	  $(BIN)/python -m pytest tests/kernels --ignore tests/kernels/test_loader.py

# Needs Debian's g++-aarch64-linux-gnu and qemu-user: builds for 64 bit Arm and runs there.
ARM := aarch64-linux-gnu
test-neon:
	cmake -S . -B build/neon -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux \
	  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_C_COMPILER=$(ARM)-gcc -DCMAKE_CXX_COMPILER=$(ARM)-g++
	cmake --build build/neon
	$(ARM)-g++ -std=c++17 -O2 -ffp-contract=off -I src/backends/policy_kernels/csrc \
	  tests/kernels/check.cc build/neon/libpolicy_kernels.so -o build/neon/check
	qemu-aarch64 -cpu max -L /usr/$(ARM) -E LD_LIBRARY_PATH=build/neon build/neon/check

clean:
	rm -rf .venv build dist

# Only the tests insist on the native kernels.
.venv/test.stamp: export POLICY_REQUIRE_KERNELS = 1

.venv/%.stamp: $(INSTALLED_FROM) | $(BIN)/python
	$(PIP_INSTALL) -e '.[$*]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv

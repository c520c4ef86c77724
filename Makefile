# The project's commands. `make` alone lists them.
PY := .venv/bin/python
UV := .venv/.tools/bin/uv

.PHONY: help setup lock protos
help:
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 16

setup: .venv/.ready ## install everything that the project needs into .venv (pinned, hashed)

.venv/.ready: requirements.lock pyproject.toml
	@sh scripts/setup

lock: .venv/.ready ## compile requirements.lock anew from pyproject.toml
	$(UV) pip compile pyproject.toml --python-version 3.11 --all-extras --group test --group lint --generate-hashes \
	  --no-header --no-annotate --no-emit-index-url --quiet --output-file requirements.lock

protos: ## generate the protobuf code beside the .proto files
	$(PY) scripts/generate_protos.py

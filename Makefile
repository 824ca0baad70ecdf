# The commands of this project. Every target sets up what it needs first; see scripts/setup.sh.
SHELL := bash
.DEFAULT_GOAL := help
PY := .venv/bin/python
# pass options on: make serve ARGS="--prefill 2 --decode 1", make test ARGS="-k store"
ARGS ?=

.PHONY: help setup serve test lint check docs proto clean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: ## make .venv with everything needed (quick when up to date)
	@scripts/setup.sh

serve: setup ## start a whole cluster on this machine
	.venv/bin/mooncake up $(ARGS)

test: setup ## all tests, also the slow ones that start real servers
	$(PY) -m pytest $(ARGS)

lint: setup ## style, types, import arrows
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

check: lint ## lint and the quick tests
	$(PY) -m pytest -m "not slow and not e2e" -x -q $(ARGS)

docs: setup ## write docs/reference.md out of the code
	$(PY) scripts/gen_reference.py

proto: setup ## regenerate the protobuf code beside its .proto files
	$(PY) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. mooncake/common/proto/*.proto

clean: ## remove .venv, caches and run files
	rm -rf .venv .cache .run .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

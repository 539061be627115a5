# Everything here works on a fresh machine with Python 3.11+, make and gcc; `make install` brings the rest.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
SOURCES := $(wildcard fxlib service workers tests examples benchmarks)
STUBS ?= .
FUZZ_SECONDS ?= 180
FUZZ_SEQUENCES ?= 40
# What measures, on a machine that others share, runs once more if it fails, and the summary shows both. What compares
# programs has one chance.
PYTEST := $(BIN)/python -m pytest -raR --reruns 1 --rerun-show-tracebacks --rerun-exclude-path tests/random_programs
# What hangs, be it where no signal ends it (a lock in C++), ends its process with a dump of all threads, and runs once more
# in another one. That is before pytest-timeout's own limit, whose signal Python handles only where it goes on.
PYTEST += -o faulthandler_timeout=280 -o faulthandler_exit_on_timeout=true
# Tensors are small: threads would be in each other's way. Each process begins with its share of the tests, in their
# order, so that most fixtures of a module are made once; who is done takes more. A process that hung leaves servers behind.
PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m tests.leave_nothing $(PYTEST) --dist worksteal
# Tests start hundreds of processes: none should compile again what the first one did.
unexport PYTHONDONTWRITEBYTECODE
# What runs beside the tests says at its end, and at once, what it has to say: of what is right, the last line.
IN_ONE_PIECE = said=$$($(1) 2>&1) && echo "$$said" | tail -n 1 || { echo "$$said"; exit 1; }
SYSTEM_PACKAGES := chromium:chromium chromedriver:chromium-driver prometheus:prometheus dot:graphviz ip:iproute2 pg_ctlcluster:postgresql

.PHONY: help install check lint types arrows protos-lint fast test others cluster own-cluster fuzz system demo bench docs reference screenshots protos format clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

install: $(INSTALLED) ## the project and its tools, in .venv

$(INSTALLED): pyproject.toml service/pyproject.toml workers/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev]' --editable ./service --editable ./workers
	@touch $@

check: lint ## all that needs no cluster
	@$(MAKE) --no-print-directory --jobs 2 --keep-going fast types arrows protos-lint

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	@$(call IN_ONE_PIECE,$(BIN)/mypy $(SOURCES))

arrows: $(INSTALLED)
	@$(call IN_ONE_PIECE,$(BIN)/lint-imports)

protos-lint: $(INSTALLED)
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/released.binpb

# A third of the time, tests wait for other processes: twice as many processes as cores.
fast: $(INSTALLED)
	$(PARALLEL) -n 4 -m "not slow and not cluster"

test: $(INSTALLED) system ## every test
	@$(MAKE) --no-print-directory --jobs 3 --keep-going cluster own-cluster others

# Fewer than alone: beside it run the tests that measure.
others: $(INSTALLED)
	$(PARALLEL) -n 3 -m "not cluster"

# Tests of clusters run one after another, in a process of their own: half of the time they wait for Ray. Those that share
# nothing are a second such process. What they say comes when all are done.
# They measure beside all others, so they have three chances; what ran again is in the summary.
# In order: tests that begin a Ray in their process and end it come before those of workers, which keep one to the end.
IN_ORDER = said=$$($(PARALLEL) -n 1 --reruns 2 -m "$(1)" $$(grep -rl mark.cluster --include='test_*.py' tests | sort) 2>&1); \
	status=$$?; echo "$$said"; exit $$status

cluster: $(INSTALLED)
	@$(call IN_ORDER,cluster and not own_cluster)

own-cluster: $(INSTALLED)
	@$(call IN_ORDER,cluster and own_cluster)

fuzz: $(INSTALLED) ## every parser, with inputs that coverage guides, for FUZZ_SECONDS (180), and long sequences of calls
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --only-binary atheris \
		--editable '.[fuzz]'
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)
	FXLIB_SEQUENCES=$(FUZZ_SEQUENCES) $(PYTEST) -k many tests/service/test_sequences.py

system: ## Debian packages that some tests and the demo use, where this user may install them
	@missing=""; \
	for pair in $(SYSTEM_PACKAGES); do \
		command -v "$${pair%%:*}" >/dev/null || missing="$$missing $${pair##*:}"; \
	done; \
	if [ -z "$$missing" ]; then \
		echo "system packages: all there"; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "system packages: skipped$$missing (needs root and apt-get)"; \
	elif log=$$(export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1; \
			apt-get update -qq 2>&1 && apt-get install -qq -y --no-install-recommends $$missing 2>&1 </dev/null); then \
		echo "system packages: installed$$missing"; \
	else \
		echo "system packages: could not install$$missing:"; echo "$$log" | tail -n 3; \
	fi

demo: $(INSTALLED) ## one model, from its own module to a faster one, with a report in demo-report/
	$(BIN)/python -m examples.dlrm.demo

bench: $(INSTALLED) ## all benchmarks; refreshes docs/benchmarks.md
	$(BIN)/python -m benchmarks

docs: $(INSTALLED) ## the pages of docs/ as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

reference: $(INSTALLED) ## the pages of docs/reference/ that come from the code and from protos/
	$(BIN)/python -m tests.reference

screenshots: $(INSTALLED) ## the pictures of docs/how-to/dashboard.md, which a test takes in chromium
	FXLIB_SCREENSHOTS=docs/how-to/dashboard $(BIN)/python -m pytest -q -k pictures tests/dashboard/test_screenshots.py

protos: $(INSTALLED) ## the stubs of protos/, into fxlib/v1/ (or under STUBS)
	$(BIN)/python -m grpc_tools.protoc --proto_path=protos \
		--python_out=$(STUBS) --pyi_out=$(STUBS) --grpc_python_out=$(STUBS) protos/fxlib/v1/*.proto

format: $(INSTALLED) ## code as `make check` wants it
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

clean: ## caches, builds and reports away; .venv stays
	rm -rf build dist *.egg-info demo-report .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find $(SOURCES) -type d -name __pycache__ -prune -exec rm -rf {} +

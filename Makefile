# Every developer verb. CI calls these and nothing else; each works on a machine that has only Python 3.11+ and make.
PYTHON ?= python3
# The program that understands docker-compose.yml.
COMPOSE ?= docker compose
# An index to take torch from, in the place of the one that deploy/install_torch.py chooses by the machine.
TORCH_INDEX_URL ?=
VENV    := .venv
BIN     := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
STAMP   := $(VENV)/.installed
# On a terminal pip shows what it downloads, with sizes and progress.
PIP     := $(BIN)/python -m pip install $(if $(shell test -t 2 && echo terminal),,--quiet) --disable-pip-version-check
# The Triton that torch 2.11 on the GPU machines has: kernels are compiled by it too. It has a folder of its own, because torch in
# .venv needs the pinned one.
OTHER_TRITON := build/triton-3.6.0
# Helm's own library, to render the chart: as large as 240 MB, so it is where the chart is checked alone.
HELM := build/helm-python-sdk-0.2.2

.PHONY: install demo docs release release-check test test-system test-matrix test-parallel prometheus nginx page-tools page-types pictures dashboards lint types fmt snapshots bench test-gpu bench-gpu-kernels bench-gpu-train bench-gpu-accuracy gpu-day gpu-wheels bench-predicted-memory bench-predicted-speed compose-up compose-down compose-smoke clean
.DEFAULT_GOAL := demo

# What `octet serve` and `octet demo` run. torch comes first and alone: the CPU build where the machine has no NVIDIA device. To change
# the build: make clean.
$(RUNTIME): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"Octet needs Python 3.11 or later, got {sys.version.split()[0]}; set PYTHON=/path/to/python3.11")'
	@test -d octet/worker || { echo "octet/worker is a file; allowed: a link to ../worker, as git has it. Run: git config core.symlinks true && git checkout -- octet"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python deploy/install_torch.py --constraints constraints.txt --index-url "$(TORCH_INDEX_URL)"
	$(PIP) --constraint constraints.txt --editable '.[service,worker]'
	touch $@

# The tools of lint, types and test as well, and torchao, which level `ao` needs. timm comes without torchvision, which has no build for
# this torch: tests load one file of timm.
$(STAMP): $(RUNTIME)
	$(PIP) --constraint constraints.txt --editable '.[service,worker,ao,dev,release]'
	$(PIP) --constraint constraints.txt --no-deps timm
	touch $@

install: $(STAMP)

# STAY=1 leaves the server and its page up until Ctrl-C.
STAY ?=
demo: $(RUNTIME)
	$(BIN)/octet demo $(if $(STAY),--stay)

# Three processes on two cores: some tests of the service wait, while those of the kernels compute; each process more collects all tests
# once more. A test that stands for a long matrix is here, the others of its matrix are in test-matrix; the service is tested on SQLite
# here, on PostgreSQL in test-system; budgets and prose are checked by lint. An empty PYTHONDONTWRITEBYTECODE lets the many processes that
# tests start, and the next run, load modules instead of compiling them again.
test test-system test-matrix test-parallel: export PYTHONDONTWRITEBYTECODE =
test: install prometheus
	$(BIN)/python -m pytest -n 3 --dist loadfile --ignore tests/test_budgets.py --ignore tests/test_prose.py

# The whole system: jobs through REST, Ray and ranks, README's own commands, every panel and alert over a live Prometheus,
# the service on PostgreSQL, kills; and all kernels compiled for Hopper.
test-system: install prometheus nginx page-types $(HELM)
	$(BIN)/python -m pytest -n 3 --dist loadfile -m 'system and not matrix'

# SIGKILL and SIGSTOP of every process at random instants from a seed, then the ledger of jobs; the seconds that each failure costs;
# and random lives of the control plane on a simulated cluster. Each ends by itself; the first takes about two hours for 1,000 signals.
CHAOS_SEED        := $(or $(CHAOS_SEED),$(strip $(shell od -An -N3 -tu4 /dev/urandom)))
CHAOS_SIGNALS     ?= 1000
CHAOS_JOBS        ?= 100
CHAOS_MINUTES     ?= 240
CHAOS_CLUSTER_SIGNALS ?= 100
CHAOS_TRANSITIONS ?= 1000000

.PHONY: chaos
chaos: install
	$(BIN)/python -m tests.chaos.run --seed $(CHAOS_SEED) --signals $(CHAOS_SIGNALS) --jobs $(CHAOS_JOBS) --minutes $(CHAOS_MINUTES)
	$(BIN)/python -m tests.chaos.run --cluster --seed $(CHAOS_SEED) --signals $(CHAOS_CLUSTER_SIGNALS) --jobs 10 --minutes 90
	$(BIN)/python -m tests.chaos.transitions --seed $(CHAOS_SEED) --transitions $(CHAOS_TRANSITIONS)
	$(BIN)/python -m tests.chaos.goodput

# The rest of the long matrices: crash points, levels, compilers, smoke runs of benchmarks. Before a release, and after a change there.
test-matrix: install $(OTHER_TRITON)
	$(BIN)/python -m pytest -n 4 --dist loadfile -m matrix

# All that several ranks are tested by: every level at every ZeRO stage over 2 and 4 ranks, checkpoints in pieces, continued jobs.
test-parallel: install
	$(BIN)/python -m pytest -n 4 --dist loadfile -m 'matrix or not matrix' tests/worker/parallel tests/worker/mesh \
	  tests/worker/checkpoint/test_checkpoint.py tests/worker/checkpoint/test_resume.py

$(OTHER_TRITON): | install
	$(PIP) --no-deps --target $@.part triton==$(patsubst build/triton-%,%,$@)
	mv $@.part $@

$(HELM): | install
	$(PIP) --no-deps --target $@.part helm-python-sdk==$(patsubst build/helm-python-sdk-%,%,$@)
	mv $@.part $@

# The tests of metrics ask a real Prometheus and Alertmanager. They are skipped where these cannot be installed; under CI=true they fail there.
prometheus:
	@{ command -v promtool && command -v prometheus-alertmanager; } >/dev/null || test "$$(id -u)" -ne 0 || ! command -v apt-get >/dev/null \
	  || { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends prometheus prometheus-alertmanager; } \
	  || echo "Prometheus could not be installed; see tests/observability/live.py"

# The test of deploy/nginx starts it from here: Debian's package, installed, would serve port 80.
NGINX := build/nginx
nginx:
	@test -x $(NGINX)/usr/sbin/nginx || ! command -v apt-get >/dev/null || { mkdir -p $(NGINX) && cd $(NGINX) \
	  && { test "$$(id -u)" -ne 0 || apt-get -qq update; } && apt-get -qq download nginx && dpkg -x nginx_*.deb . && rm nginx_*.deb; } \
	  || echo "nginx could not be fetched; see tests/service/test_nginx.py"

# The tests of the page look at it in Debian's Chromium and ask axe; its modules are checked against types from the OpenAPI document.
# Nothing of npm is committed or installed at a user's. Where npm is missing, lint goes without it; under CI=true the tests fail then.
PAGE_TOOLS := build/page-tools
PAGE_BIN   := $(PAGE_TOOLS)/node_modules/.bin
page-tools: $(PAGE_TOOLS)/.installed
	@command -v chromium >/dev/null || test "$$(id -u)" -ne 0 || ! command -v apt-get >/dev/null \
	  || { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium; } \
	  || echo "Chromium could not be installed; see tests/page/conftest.py"

$(PAGE_TOOLS)/.installed: | $(PAGE_TOOLS)
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(PAGE_TOOLS) \
	  axe-core@4.14.1 openapi-typescript@7.13.0 prettier@3.10.1 typescript@5.9.3 && touch $@ \
	  || test "$$CI" != true; else test "$$CI" != true; fi || { echo "missing: npm and its registry, for the checks of the page"; exit 1; }

$(PAGE_TOOLS):
	@mkdir -p $@

page-types: install page-tools
	@test ! -x $(PAGE_BIN)/tsc || { $(BIN)/python -m tests.page.openapi > $(PAGE_TOOLS)/openapi.json \
	  && $(PAGE_BIN)/openapi-typescript $(PAGE_TOOLS)/openapi.json --output $(PAGE_TOOLS)/octet-api.d.ts >/dev/null \
	  && $(PAGE_BIN)/tsc --project service/page/tsconfig.json \
	  && $(PAGE_BIN)/prettier --log-level warn --print-width 128 --check service/page/static/js; }

# Draw the page into docs/page from jobs that a server trains meanwhile.
pictures: install page-tools
	$(BIN)/python -m tests.page.pictures

# Write the dashboards' JSON, and draw them from a live run into docs/dashboards.
dashboards: install prometheus
	$(BIN)/python -m deploy.grafana.generate
	$(BIN)/python -m tests.observability.draw

# The site of docs/, with references made from docstrings, JSON schema and OpenAPI. A dead link or anchor is an error. Material for MkDocs
# gets fixes until May 2027; Zensical, its successor, reads the same pages.
docs: install
	$(BIN)/python -m docs.site.prepare build/docs/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file docs/site/mkdocs.yml
	@echo "Built build/docs/site. To read it: $(BIN)/python -m http.server --directory build/docs/site --bind 127.0.0.1 8080"

# The files of a release into dist, and its images into a container engine: git tag v0.1.0 && make release TAG=v0.1.0. IMAGES= leaves
# images out, IMAGES="control node" builds two. release-check makes what needs no engine from HEAD, without PyTorch's SBOM.
TAG    ?=
ENGINE ?= docker
release: install $(HELM)
	$(BIN)/python -m deploy.release --tag "$(or $(TAG),$(error TAG is empty; allowed: a tag such as v0.1.0))" --out dist \
	  --engine "$(ENGINE)" $(if $(filter-out undefined,$(origin IMAGES)),--images "$(IMAGES)")

release-check: install $(HELM)
	rm -rf build/release
	$(BIN)/python -m deploy.release --out build/release --sbom "" --sbom service --images ""

lint: install page-types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/test_budgets.py tests/test_prose.py

types: install
	$(BIN)/mypy

fmt: install page-tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	test ! -x $(PAGE_BIN)/prettier || $(PAGE_BIN)/prettier --log-level warn --print-width 128 --write service/page/static/js

# Rewrite the frozen surfaces: JSON schemas, the OpenAPI document, the manifests of deploy/kubernetes. Review the diff.
snapshots: install $(HELM)
	OCTET_UPDATE_SNAPSHOTS=1 $(BIN)/python -m pytest -q tests/api_schemas tests/service/test_openapi.py tests/service/test_database.py tests/worker/models/test_config_fields.py
	$(BIN)/python -m deploy.helm.render

bench: install
	$(BIN)/python -m benchmarks.host_time --levels O2

# On a machine with a GPU, run by the Python that has its torch: docs/benchmarks.md. Each ends within eight minutes.
GPU_PYTHON ?= python3
OUT        ?= build/benchmarks

# The tests that need a GPU, the kernels against their twins among them. Compilation takes most of the time, hence the processes. A
# warning fails no test here: this torch is another than the pinned one, which `make test` looks after.
test-gpu:
	$(GPU_PYTHON) -m pytest -n 8 -p no:cacheprovider -p tests.kit.on_device --timeout 150 --tb short -W default tests/worker/kernels/cuda tests/worker/fp8/test_linear_on_device.py tests/worker/train/test_step_graph_on_device.py tests/benchmarks/test_gpu_benchmarks.py

bench-gpu-kernels bench-gpu-train bench-gpu-accuracy: bench-gpu-%:
	$(GPU_PYTHON) -m benchmarks.gpu.$* --out $(OUT)

# Half an hour on such a machine: test-gpu, then every figure beside its prediction, into benchmarks/results: docs/gpu-day.md. It
# continues what was stopped. PART=1, 2 or 3 is one third of it and ends within ten minutes.
PART    ?=
GPU_DAY ?= build/gpu-day
gpu-day:
	$(GPU_PYTHON) -m benchmarks.gpu.day $(if $(PART),--part $(PART)) --out $(GPU_DAY)

# The packages that a GPU machine's Python 3.12 has not, for a machine without network. Triton, torch, NumPy and safetensors it has.
GPU_WHEELS := pydantic|pydantic_core|annotated-types|typing-inspection
gpu-wheels: | install
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest build/wheels --python-version 3.12 \
	  --implementation cp $(foreach glibc,28 17,--platform manylinux_2_$(glibc)_x86_64) $$(grep -E '^($(GPU_WHEELS))==' constraints.txt)

# The same steps' peak memory and speed, predicted on a machine without a GPU.
bench-predicted-memory bench-predicted-speed: bench-predicted-%: install
	$(BIN)/python -m benchmarks.gpu.predicted_$* --out $(OUT)

# The cluster of docker-compose.yml on this machine: api on 127.0.0.1:8000, Grafana on :3000, Prometheus on :9090.
compose-up:
	$(COMPOSE) up -d --build

compose-down:
	$(COMPOSE) down

# Builds and starts the stack, kills each of its containers while jobs train, and removes it with its volumes.
compose-smoke: install
	COMPOSE="$(COMPOSE)" $(BIN)/python deploy/compose/smoke.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info

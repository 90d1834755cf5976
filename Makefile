# Every developer verb. CI calls these and nothing else; each works on a machine that has only Python 3.11+ and make.
PYTHON ?= python3
# Whatever understands docker-compose.yml.
COMPOSE ?= docker compose
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# What torch 2.11 on the GPU machines has: kernels are compiled by it too. In a folder, since torch here needs the one pinned.
OTHER_TRITON := build/triton-3.6.0

.PHONY: install demo test prometheus dashboards lint types fmt snapshots bench test-gpu bench-gpu-kernels bench-gpu-train bench-gpu-accuracy bench-predicted-memory compose-up compose-down compose-smoke clean
.DEFAULT_GOAL := demo

# torch comes first and pinned: an unpinned torch, or one pulled in by a dependency, brings gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"Octet needs Python 3.11 or later, got {sys.version.split()[0]}; set PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[client,service,worker,dev]'
	touch $@

install: $(STAMP)

demo: install
	$(BIN)/octet demo

test: install prometheus $(OTHER_TRITON)
	$(BIN)/python -m pytest -n 2 --dist loadfile

$(OTHER_TRITON): | install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part triton==$(patsubst build/triton-%,%,$@)
	mv $@.part $@

# The tests of metrics ask a real Prometheus. Where it cannot be installed they are skipped, or fail under CI=true.
prometheus:
	@command -v promtool >/dev/null || test "$$(id -u)" -ne 0 || ! command -v apt-get >/dev/null \
	  || { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends prometheus; } \
	  || echo "Prometheus could not be installed; see tests/observability/live.py"

# Write the dashboards' JSON, and draw them from a live run into docs/dashboards.
dashboards: install prometheus
	$(BIN)/python -m deploy.grafana.generate
	$(BIN)/python -m tests.observability.draw

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/test_budgets.py

types: install
	$(BIN)/mypy

fmt: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Write the frozen surfaces anew: JSON schemas, the OpenAPI document, alerts for Kubernetes. Review the diff.
snapshots: install
	OCTET_UPDATE_SNAPSHOTS=1 $(BIN)/python -m pytest -q tests/api_schemas tests/service/test_openapi.py tests/deploy/test_kubernetes.py

bench: install
	$(BIN)/python -m benchmarks.cpu_step

# On a machine with a GPU, by the Python that has its torch: docs/benchmarks.md. Each ends within eight minutes.
GPU_PYTHON ?= python3
OUT        ?= benchmarks/results

# What only a chip can show, and the kernels against their twins on it. Most of the time goes into compiling, hence the processes.
test-gpu:
	$(GPU_PYTHON) -m pytest -n 8 -p no:cacheprovider tests/worker/kernels/cuda tests/worker/fp8/test_linear_on_device.py tests/benchmarks/test_gpu_benchmarks.py

bench-gpu-kernels bench-gpu-train bench-gpu-accuracy: bench-gpu-%:
	$(GPU_PYTHON) -m benchmarks.gpu.$* --out $(OUT)

# The same steps' peak memory, on a machine without a GPU.
bench-predicted-memory: install
	$(BIN)/python -m benchmarks.gpu.predicted_memory --out $(OUT)

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

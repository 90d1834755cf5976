"""Every command in README, CONTRIBUTING and docs is executed: by this file, or by the file that `ELSEWHERE` names.

The commands run unchanged in a scratch folder that has what they need: `.venv/bin` with this Python's programs, and a copy
of the example with few steps over a small text. Only the server's port, job ids and scratch paths are filled in.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from octet.client import Client
from tests.docs.blocks import DOCUMENTS, ROOT, blocks, commands
from tests.kit.ports import free_port
from tests.kit.waiting import LONG_S

SERVE = ".venv/bin/octet serve &"
EXAMPLE = "examples/gpt-tiny.yaml"
STEPS = 2
RUN_HERE = (
    r"\.venv/bin/octet (serve|submit|list|metrics|logs)\b.*",
    r"octet( (list|show|watch|metrics|logs|events|doctor|debug) .+)?",
    r"printf .*",
    r"curl .*",
    r"\.venv/bin/torchrun .* -m octet\.worker .*",
    r"python3 -m pip install -q --no-index .*",
)


@dataclass(frozen=True)
class Elsewhere:
    """The file that executes a command, and the words in it that do. needs: requirement that `make test` does not have."""

    file: str
    words: str
    needs: str = ""


_EXAMPLES = "tests/worker/integrations/test_examples.py"
_SMOKE = "deploy/compose/smoke.py"
_CLUSTER = Elsewhere("tests/deploy/test_kubernetes.py", "def test_kustomize_renders_all_of_it", "a Kubernetes cluster")
ELSEWHERE = {
    r"make demo": Elsewhere("tests/client/demo/test_run.py", "octet.client.cli"),
    r"make (test|test-system|lint|types)": Elsewhere(".ci/run", "make lint types test test-system"),
    r"make test-matrix": Elsewhere("Makefile", "-m matrix"),
    r"make test-parallel": Elsewhere("Makefile", "tests/worker/parallel"),
    r"make install": Elsewhere("Makefile", "test: install"),
    r"make release-check": Elsewhere("tests/packaging/test_release.py", "def test_the_files_of_a_release"),
    r"make docs": Elsewhere("tests/docs/test_site.py", '"docs.site.prepare"'),
    r"pip install 'octet-fp8\[worker\]'": Elsewhere("tests/packaging/test_wheel.py", "pip install 'octet-fp8[worker]'"),
    r"\.venv/bin/python examples/is_o2_safe/compare\.py .*": Elsewhere("tests/docs/test_tutorial.py", "compare.main()"),
    r"octet plan .*": Elsewhere("tests/client/cli/test_with_server.py", "def test_plan"),
    r"octet compare.*": Elsewhere("tests/client/cli/test_compare.py", "def test_jobs_are_paired"),
    r"octet pause cmp_.*": Elsewhere("tests/client/cli/test_compare.py", 'octet("pause", comparison_id)'),
    r"octet delete cmp_.*": Elsewhere("tests/client/cli/test_compare.py", 'octet("delete", comparison_id, "--yes")'),
    r"octet keys (create|list|rotate|revoke).*": Elsewhere(
        "tests/client/cli/test_with_server.py", "def test_a_key_is_made_listed_rotated_and_revoked"
    ),
    r"octet log(in|out)": Elsewhere("tests/service/test_sign_in.py", "def test_a_person_signs_in_works_and_signs_out"),
    r"make fmt": Elsewhere("Makefile", "ruff format --check"),
    r"make snapshots": Elsewhere("tests/service/test_openapi.py", "OCTET_UPDATE_SNAPSHOTS"),
    r"make pictures": Elsewhere("tests/page/pictures.py", "def main", "a browser, and minutes"),
    r"make dashboards": Elsewhere("tests/observability/test_live.py", "def test_a_panel_has_data"),
    r"make bench": Elsewhere("tests/benchmarks/test_host_time.py", "def test_an_o2_step_issues_no_more_than_it_did"),
    r"make chaos": Elsewhere("tests/e2e/test_chaos.py", "outcome = weather(plan, tmp_path)"),
    r"make compose-smoke": Elsewhere("Makefile", "deploy/compose/smoke.py", "Docker"),
    r"make compose-up|docker compose up -d --build": Elsewhere(_SMOKE, 'compose("up", "-d", "--build")', "Docker"),
    r"make compose-down|docker compose down": Elsewhere(_SMOKE, 'compose("down", "-v")', "Docker"),
    r"docker compose run --rm demo": Elsewhere(_SMOKE, 'compose("--profile", "demo", "run", "--rm", "demo")', "Docker"),
    r"export OCTET_API_KEY=.*": Elsewhere(_SMOKE, 'compose("exec", "-T", "api", "cat", "/secrets/api/key")', "Docker"),
    r"octet submit examples/gpt-tiny\.yaml --watch": Elsewhere(_SMOKE, "examples/gpt-tiny.yaml", "Docker"),
    r"octet list": Elsewhere("README.md", ".venv/bin/octet list"),
    r"docker build .*": Elsewhere("docker-compose.yml", "dockerfile: deploy/docker/Dockerfile", "Docker"),
    r"prometheus=.*|operator=.*|kubectl .*": _CLUSTER,
    r"helm upgrade .*": Elsewhere(
        "tests/deploy/test_helm.py", "def test_what_it_renders_fits_the_schemas", "a Kubernetes cluster"
    ),
    r"make gpu-day.*": Elsewhere(
        "tests/benchmarks/test_gpu_day.py", "def test_steps_that_ended_well_are_not_run_again", "a GPU"
    ),
    r"git (switch -c gpu-day|add benchmarks/results .*|commit -m .*)": Elsewhere("docs/gpu-day.md", "as a pull request"),
    r"make test-gpu.*|make bench-gpu-kernels .*": Elsewhere("tests/benchmarks/test_gpu_benchmarks.py", '"--smoke"', "a GPU"),
    r"\.venv/bin/python examples/transformers/train\.py .*": Elsewhere(_EXAMPLES, "def test_trainer"),
    r"\.venv/bin/python examples/accelerate/train\.py .*": Elsewhere(_EXAMPLES, "def test_accelerate"),
    r"\.venv/bin/python examples/fabric/train\.py .*": Elsewhere(_EXAMPLES, "def test_fabric"),
    r"\.venv/bin/python examples/lightning/train\.py .*": Elsewhere(_EXAMPLES, "def test_lightning"),
    r"\.venv/bin/torchrun .* examples/pipeline/train\.py .*": Elsewhere(
        "tests/worker/parallel/test_pipeline_example.py", "def test_the_example_trains_under_torchrun"
    ),
    r"\.venv/bin/torchrun .* examples/accelerate/(train|wrapped)\.py .*": Elsewhere(
        _EXAMPLES, "def test_accelerate_on_two_ranks"
    ),
    r"python -m benchmarks\.gpu\.kernels --sections speedup .*": Elsewhere(
        "tests/benchmarks/test_gpu_benchmarks.py", '"Speedup by shape"', "a GPU"
    ),
    r"python3 -m benchmarks\.gpu\.train --sections job .*": Elsewhere(
        "tests/benchmarks/test_gpu_benchmarks.py", '"Job"', "a GPU"
    ),
    r"octet (submit job\.yaml --watch|exports JOB|download JOB --export .*)": Elsewhere(
        "tests/client/test_download.py", "def test_an_export_is_asked_for_shown_and_downloaded"
    ),
    r"python -m octet\.compat\.msamp mnist\.py .*": Elsewhere("tests/compat/test_msamp.py", "def test_its_mnist_example_runs"),
    r"octet import (accelerate|deepspeed|transformers|axolotl|torchtitan) .*": Elsewhere(
        "tests/client/cli/test_imports.py", "def test_each_kind_of_file_is_a_job"
    ),
    r"vllm serve .*": Elsewhere("docs/serving.md", "have neither server", "vLLM"),
    r"python -m sglang\.launch_server .*": Elsewhere("docs/serving.md", "have neither server", "SGLang"),
    r"python -m benchmarks\.accuracy --seeds 5 --levels O2-hopper,.*": Elsewhere(
        "tests/benchmarks/test_accuracy.py", '"O2,O2-hopper,O2-hopper-fast"'
    ),
    r"python -m benchmarks\.gpu\.roofline .*": Elsewhere("tests/worker/fp8/test_speedups.py", "as_text([computed_table()])"),
}
"""Commands executed elsewhere, by regular expression."""


def shown() -> list[tuple[str, str]]:
    return [(document, command) for document in DOCUMENTS for command in commands(document)]


def is_run_here(command: str) -> bool:
    return any(re.fullmatch(pattern, command, re.DOTALL) for pattern in RUN_HERE)


@pytest.mark.parametrize(("document", "command"), shown())
def test_a_command_is_executed_somewhere(document: str, command: str) -> None:
    named = [where for pattern, where in ELSEWHERE.items() if re.fullmatch(pattern, command, re.DOTALL)]
    assert len(named) + is_run_here(command) == 1, f"{document} shows what no table has, or two have: {command}"
    for where in named:
        assert where.words in (ROOT / where.file).read_text(), f"{where.file} does not execute {command}"


def test_every_command_in_a_table_is_in_a_document() -> None:
    texts = [command for _, command in shown()]
    stale = [pattern for pattern in ELSEWHERE if not any(re.fullmatch(pattern, text, re.DOTALL) for text in texts)]
    assert stale == []


def test_every_make_target_exists() -> None:
    targets = {word for _, command in shown() if command.startswith("make ") for word in shlex.split(command)[1:]}
    answer = subprocess.run(["make", "--dry-run", *sorted(targets)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def test_every_image_that_is_built_is_a_stage_of_the_dockerfile() -> None:
    stages = set(re.findall(r"^FROM .+ AS (\S+)$", (ROOT / "deploy/docker/Dockerfile").read_text(), flags=re.MULTILINE))
    built = [shlex.split(command) for _, command in shown() if command.startswith("docker build ")]
    wanted = {words[words.index("--target") + 1] for words in built}
    assert wanted
    assert wanted <= stages


@dataclass
class Scratch:
    """A folder in which README's commands run."""

    folder: Path
    port: int

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": str(ROOT),
            "OCTET_URL": f"http://127.0.0.1:{self.port}",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PET_MASTER_PORT": str(free_port()),  # torchrun's own variable; its default may be taken
        }

    def run(self, command: str, job_id: str = "") -> str:
        """Run a command and return its standard output. It must exit with 0."""
        text = command.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{self.port}").replace("job_…", job_id)
        text = text.replace("/usr/share/doc", str(self.folder / "text")).replace("/tmp/site", f"{self.folder}/site")
        text = text.replace('"steps": 200', f'"steps": {STEPS}, "eval_batches": 1')
        text = text.replace('"global_batch_size": 16, "sequence_length": 128', '"global_batch_size": 2, "sequence_length": 64')
        arguments: dict[str, Any] = {"cwd": self.folder, "env": self.environment(), "timeout": LONG_S}
        answer = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False, **arguments)
        assert answer.returncode == 0, f"{text}\n{answer.stdout[-3000:]}\n{answer.stderr[-3000:]}"
        return answer.stdout


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    folder = tmp_path_factory.mktemp("readme")
    programs = folder / ".venv/bin"
    programs.mkdir(parents=True)
    for name, module in {"octet": "octet.client.cli", "torchrun": "torch.distributed.run"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
        (programs / name).chmod(0o755)
    text = folder / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text("\n".join(f"{line} of {number}: the quick brown fox" for line in range(400)))
    document = yaml.safe_load((ROOT / EXAMPLE).read_text())
    document["data"]["path"] = str(text)
    document["training"] |= {"steps": STEPS, "global_batch_size": 2, "sequence_length": 64}
    document["training"] |= {"schedule": {"warmup_steps": 1}, "eval_batches": 1}
    (folder / "examples").mkdir()
    (folder / EXAMPLE).write_text(yaml.safe_dump(document))
    return Scratch(folder, free_port())


@pytest.fixture(scope="module")
def served(scratch: Scratch) -> Iterator[Scratch]:
    """Start README's own server, and stop it at the end."""
    assert SERVE in commands("README.md")
    command = [*shlex.split(SERVE.removesuffix("&")), "--port", str(scratch.port)]
    with (scratch.folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=scratch.folder, env=scratch.environment(), stdout=log, stderr=log)
    try:
        with Client(f"http://127.0.0.1:{scratch.port}") as client:
            deadline = time.monotonic() + LONG_S
            while not client.is_ready():
                assert server.poll() is None, (scratch.folder / "server.log").read_text()
                assert time.monotonic() < deadline, (scratch.folder / "server.log").read_text()
                time.sleep(0.1)
        yield scratch
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(LONG_S)


@pytest.mark.system
@pytest.mark.skipif(shutil.which("curl") is None, reason="missing: curl")
def test_the_commands_of_the_readme_run_in_order(served: Scratch) -> None:
    said: dict[str, str] = {}
    job_id = ""
    for command in commands("README.md"):
        if not is_run_here(command) or command == SERVE or "torchrun" in command:
            continue
        said[command] = served.run(command, job_id)
        if "submit" in command or " -d " in command:
            (job_id,) = set(re.findall(r"job_[0-9a-z]{26}", said[command]))
    watched, listed, curve, *_, over_http, points, events = said.values()
    assert "gpt-tiny  succeeded  step 2/2" in watched
    assert "gpt-tiny" in listed
    assert [point["step"] for point in json.loads(curve)] == list(range(1, STEPS + 1))
    assert json.loads(over_http).get("state") == "queued", over_http
    assert json.loads(points)["object"] == "list"
    assert "job.succeeded" in events
    with Client(f"http://127.0.0.1:{served.port}") as client:
        (first,) = [job.id for job in client.jobs(state="succeeded")][-1:]
    for command in commands("docs/terminal.md"):
        served.run(command, first)
    assert list(served.folder.glob("octet-debug-*.tar.gz"))


@pytest.mark.system
def test_the_example_runs_under_torchrun(scratch: Scratch) -> None:
    (command,) = [text for text in commands("docs/recipes.md") if "torchrun" in text]
    scratch.run(command)
    summary: dict[str, Any] = json.loads((scratch.folder / "runs/first/summary.json").read_text())
    assert summary["steps"] == STEPS


def test_the_library_snippet_trains(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    (snippet,) = blocks("README.md", "python")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}
    exec(snippet, names)
    said = capsys.readouterr().out
    assert "O2" in said
    assert "'exp_avg': " in said
    model, optimizer = names["model"], names["optimizer"]
    losses: list[float] = []
    inputs = torch.randn(32, 64)
    for _ in range(20):
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.system
def test_wheels_from_a_folder_are_installed(scratch: Scratch) -> None:
    (command,) = [text for text in commands("docs/benchmarks.md") if "--no-index" in text]
    (scratch.folder / "build/wheels").mkdir(parents=True)
    with zipfile.ZipFile(scratch.folder / "build/wheels/carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "ANSWER = 42\n")
        wheel.writestr("carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr("carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("carried-1.0.dist-info/RECORD", "")
    assert scratch.run(f"{command} && python3 -c 'import carried; print(carried.ANSWER)'") == "42\n"

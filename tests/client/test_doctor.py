"""Answers of `octet doctor` about torch, drivers and disks, for machines that this one is not."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octet.api_schemas import ErrorCode, Pool, Problem
from octet.client import Client, doctor
from octet.client.doctor import Check, check_machine
from octet.client.errors import ApiError

SMI = "NVIDIA H100 80GB HBM3, 81559 MiB, 580.95.05, 9.0"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Check]]:
    """Look at a machine with this answer of torch (None: it cannot be imported) and of nvidia-smi."""

    def look(
        torch: str | None = '{"cuda": null, "devices": []}', smi: str | None = None, free: int = 10**12
    ) -> dict[str, Check]:
        def run(command: Sequence[str], **_: Any) -> SimpleNamespace:
            answer = smi if command[0] == "nvidia-smi" else torch
            if answer is None:
                raise subprocess.CalledProcessError(1, list(command))
            return SimpleNamespace(stdout=f"{answer}\n")

        monkeypatch.setattr(doctor.subprocess, "run", run)
        monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}" if smi else None)
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: SimpleNamespace(free=free, total=10**13))
        with Client("http://127.0.0.1:9", patience_s=0) as client:
            checkup = check_machine(client, tmp_path)
        assert checkup.is_well == all(check.standing != "bad" for check in checkup.checks)
        return {check.part: check for check in checkup.checks}

    return look


def test_a_machine_with_cpus_alone_is_well(machine: Callable[..., dict[str, Check]]) -> None:
    found = machine()
    assert found["driver"].standing == "note"
    assert found["torch"] == Check(part="torch", standing="ok", found="built for CPUs, sees no GPU: jobs run on the CPUs")


def test_a_gpu_that_torch_sees_is_well(machine: Callable[..., dict[str, Check]]) -> None:
    found = machine('{"cuda": "13.0", "devices": [["NVIDIA H100", [9, 0]]]}', SMI)
    assert found["driver"].found == "580.95.05: NVIDIA H100 80GB HBM3, 81559 MiB, compute capability 9.0"
    assert (found["torch"].standing, found["torch"].found) == ("ok", "built for CUDA 13.0, sees NVIDIA H100 (9.0)")


def test_a_gpu_without_fp8_instructions_is_named(machine: Callable[..., dict[str, Check]]) -> None:
    found = machine('{"cuda": "13.0", "devices": [["NVIDIA A100", [8, 0]]]}', SMI)["torch"]
    assert found.standing == "note"
    assert found.hint is not None
    assert "8.9" in found.hint


@pytest.mark.parametrize(
    ("torch", "change"),
    [('{"cuda": null, "devices": []}', "build for CUDA"), ('{"cuda": "13.0", "devices": []}', "Install a driver")],
)
def test_a_gpu_that_torch_does_not_see_is_wrong(machine: Callable[..., dict[str, Check]], torch: str, change: str) -> None:
    found = machine(torch, SMI)["torch"]
    assert found.standing == "bad"
    assert found.hint is not None
    assert change in found.hint


def test_a_torch_that_cannot_be_imported_is_wrong(machine: Callable[..., dict[str, Check]]) -> None:
    assert machine(None)["torch"].standing == "bad"


def test_a_full_disk_is_wrong(machine: Callable[..., dict[str, Check]]) -> None:
    found = machine(free=10**8)["disk"]
    assert found.standing == "bad"
    assert found.found.startswith("100 MB of 10 TB free")


@pytest.mark.system
def test_torch_is_asked_in_a_process_of_its_own() -> None:
    """The program that is handed to Python is one: its answer has both facts."""
    answer = subprocess.run([sys.executable, "-c", doctor.ASK_TORCH], capture_output=True, text=True, check=True).stdout
    assert set(json.loads(answer)) == {"cuda", "devices"}


@pytest.mark.parametrize(("present", "standing"), [(None, "ok"), (4, "ok"), (1, "note")])
def test_a_pool_that_promises_more_than_nodes_offer_is_named(
    machine: Callable[..., dict[str, Check]], monkeypatch: pytest.MonkeyPatch, present: int | None, standing: str
) -> None:
    counts = {"slots": 4, "slots_used": 1, "jobs_queued": 2, "jobs_live": 1, "threads_per_worker": 1}
    measured = {"memory_per_device_bytes": None, "measured_to_planned": 1.04}
    pool = Pool.model_validate({"name": "h100", "accelerator": "cuda", "slots_present": present} | counts | measured)
    monkeypatch.setattr(Client, "pools", lambda _: iter([pool]))
    monkeypatch.setattr(Client, "alerts", lambda _: [])
    monkeypatch.setattr(Client, "why_not_ready", lambda _: None)
    found = machine()["pool h100"]
    assert (found.standing, "nodes offer 1" in found.found) == (standing, present == 1)
    assert "2 queued; jobs took 104.0% of their planned bytes" in found.found


def test_an_older_server_lists_no_alerts(machine: Callable[..., dict[str, Check]], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Client) -> None:
        raise ApiError(Problem(title="Not found", status=404, detail="there is no such route", code=ErrorCode.NOT_FOUND))

    monkeypatch.setattr(Client, "pools", lambda _: iter(()))
    monkeypatch.setattr(Client, "alerts", missing)
    monkeypatch.setattr(Client, "why_not_ready", lambda _: None)
    found = machine()
    assert (found["server"].standing, found["alert"].standing) == ("ok", "note")
    assert "older than this client" in found["alert"].found

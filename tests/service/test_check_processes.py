"""Checks of files run in processes with limits, and those of one tenant do not stop those of another."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import Files, JobSpec
from octet.service.app import create_app
from octet.service.errors import InvalidRequest, NotReady
from octet.service.jobs import check_processes as module
from octet.service.jobs.check_processes import CheckProcesses
from octet.service.jobs.file_checks import Inputs, inputs_of
from octet.service.settings import Settings
from tests.kit.waiting import LONG_S
from tests.service.test_jobs_api import problem_of
from tests.service.world import World

Document = dict[str, Any]
MOST_GROWN_BYTES = 48 << 20


@pytest.fixture
def processes() -> Iterator[CheckProcesses]:
    processes = CheckProcesses()
    yield processes
    processes.close()


def memory(field: str) -> int:
    """Return a figure of this process's memory in bytes, such as VmRSS or VmHWM, the peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) << 10


def children_of(process_id: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()]


def with_tokenizer(document: Document, folder: Path, settings: str) -> Document:
    """Return a job that reads a tokenizer whose settings are these."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(settings)
    return document | {"data": document["data"] | {"tokenizer": str(folder)}}


def test_four_large_files_at_once_take_no_memory_of_the_api(
    client: TestClient, spec_document: Document, tmp_path: Path
) -> None:
    """60 MB of settings had taken 0.9 GB of the API's memory."""
    settings = f"[{'[],' * (4 << 20)}[]]"
    documents = [with_tokenizer(spec_document, tmp_path / str(number), settings) for number in range(4)]
    assert client.post("/v1/jobs/validate", json=spec_document).status_code == 200
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts from what is in use
    before = memory("VmRSS")
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda document: client.post("/v1/jobs/validate", json=document), documents))
    assert memory("VmHWM") - before < MOST_GROWN_BYTES
    for answer, document in zip(answers, documents, strict=True):
        (found,) = problem_of(answer, 422).errors
        assert document["data"]["tokenizer"] in found.got
        assert found.allowed == "files whose check takes at most 128 MiB of memory"
    assert client.post("/v1/jobs/validate", json=spec_document).status_code == 200


def test_slow_checks_of_one_tenant_do_not_refuse_another(
    world: World, tmp_path: Path, spec_document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 slow checks of one had refused 7 of 8 submissions of another."""
    let_go, is_full = threading.Event(), threading.Semaphore(0)

    def check(_: CheckProcesses, inputs: Inputs, _files: Files) -> None:
        if inputs.sequence_length > 8:
            is_full.release()
            assert let_go.wait(LONG_S)

    monkeypatch.setattr(CheckProcesses, "check", check)
    keys = ("greedy:the key of the greedy", "modest:the key of the modest")
    app = create_app(Settings(data_dir=tmp_path, api_keys=keys), database=world.database)
    greedy, modest = ({"Authorization": f"Bearer {key.partition(':')[2]}"} for key in keys)

    def with_length(number: int) -> Document:
        return spec_document | {"training": spec_document["training"] | {"sequence_length": number}}

    with TestClient(app, base_url="http://127.0.0.1:8000") as client, ThreadPoolExecutor(16) as threads:
        slow = [threads.submit(client.post, "/v1/jobs", json=with_length(9 + each), headers=greedy) for each in range(16)]
        for _ in range(4):
            assert is_full.acquire(timeout=LONG_S)
        answers = [client.post("/v1/jobs", json=with_length(8), headers=modest).status_code for _ in range(8)]
        let_go.set()
        assert answers == [201] * 8
        assert {each.result().status_code for each in slow} == {201}


def test_files_that_take_too_long_are_refused(spec_document: Document, tmp_path: Path, processes: CheckProcesses) -> None:
    folder = tmp_path / "tokenizer"
    with_tokenizer(spec_document, folder, "{}")
    records = tmp_path / "records.jsonl"
    records.write_text('{"prompt":"","completion":"x"}\n' * (1 << 20))
    data = {"source": "jsonl", "path": str(records), "tokenizer": str(folder)}
    inputs = inputs_of(JobSpec.model_validate(spec_document | {"data": data}))
    files = Files((str(tmp_path),), timeout_s=0.01)
    with pytest.raises(InvalidRequest) as refused:
        processes.check(inputs, files)
    (found,) = refused.value.errors
    assert found.allowed == "files that can be checked within 0.01 s (data_check_timeout_s)"
    assert str(records) in found.got


def test_checks_go_on_after_their_processes_were_killed(
    spec_document: Document, tmp_path: Path, processes: CheckProcesses
) -> None:
    inputs = inputs_of(JobSpec.model_validate(spec_document))
    files = Settings(data_dir=tmp_path).readable_files
    processes.check(inputs, files)
    server = processes._server
    assert server is not None
    (child,) = children_of(server.pid)
    os.kill(child, signal.SIGKILL)
    with pytest.raises(NotReady, match="ended; try again"):
        processes.check(inputs, files)
    processes.check(inputs, files)
    (child,) = children_of(server.pid)
    os.kill(child, signal.SIGKILL)
    server.kill()
    server.wait()
    with pytest.raises(NotReady):
        processes.check(inputs, files)
    processes.check(inputs, files)


def test_a_child_that_has_grown_gives_its_memory_back(
    spec_document: Document, tmp_path: Path, processes: CheckProcesses
) -> None:
    document = with_tokenizer(spec_document, tmp_path / "tokenizer", json.dumps(["x"] * (2 << 20)))
    files = Settings(data_dir=tmp_path).readable_files
    processes.check(inputs_of(JobSpec.model_validate(document)), files)
    assert processes._idle == []
    processes.check(inputs_of(JobSpec.model_validate(spec_document)), files)
    assert len(processes._idle) == 1


def test_processes_know_no_secrets_of_the_service(
    spec_document: Document, tmp_path: Path, processes: CheckProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTET_API_KEYS", "a secret of the service")
    processes.check(inputs_of(JobSpec.model_validate(spec_document)), Settings(data_dir=tmp_path).readable_files)
    assert processes._server is not None
    assert b"a secret of the service" not in Path(f"/proc/{processes._server.pid}/environ").read_bytes()
    assert module._COMMAND[1] == "-P"

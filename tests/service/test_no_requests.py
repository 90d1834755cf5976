"""The service asks nobody on behalf of a user: places in a spec are paths on its own disk, whatever they look like."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import JobSpec
from octet.service.jobs import admission
from octet.service.settings import Settings


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server on loopback that would notice a connection."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        yield listener


FORMS = ("http://{}/x", "https://{}", "ftp://{}/x", "file:///etc/passwd", "//{}/x", "\\\\{}\\x", "s3://{}/x")


@pytest.mark.parametrize("field", ["data.path", "data.tokenizer", "model.path"])
def test_a_place_on_the_network_is_refused_without_a_look(
    client: TestClient, spec_document: dict[str, Any], listener: socket.socket, field: str
) -> None:
    part, name = field.split(".")
    if field == "data.tokenizer":
        spec_document["data"] = {"source": "jsonl", "path": spec_document["data"]["path"]}
    if part == "model":
        spec_document["model"] = {}
    for form in FORMS:
        spec_document[part] |= {name: form.format(f"127.0.0.1:{listener.getsockname()[1]}")}
        for path in ("/v1/jobs", "/v1/jobs/validate"):
            answer = client.post(path, json=spec_document)
            assert answer.status_code == 422, answer.text
            fields = [violation["field"] for violation in answer.json()["errors"]]
            assert any(found.startswith(part) for found in fields), fields
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_store_that_the_operator_allows_is_not_asked_either(
    tmp_path: Path, spec_document: dict[str, Any], listener: socket.socket
) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/corpus"
    spec_document["data"] = {"source": "text", "path": f"{url}/a"}
    admission.check(JobSpec.model_validate(spec_document), Settings(data_dir=tmp_path, data_stores=(url,)))
    with pytest.raises(BlockingIOError):
        listener.accept()

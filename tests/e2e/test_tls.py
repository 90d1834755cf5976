"""A whole `octet serve` with a certificate: a job runs, and its ranks report over https."""

from pathlib import Path
from typing import Any

import pytest

from octet.api_schemas import JobState
from octet.client import Client
from tests.e2e.octet_server import Server
from tests.kit.certificates import Authority
from tests.kit.waiting import LONG_S

pytestmark = pytest.mark.system


def test_a_job_runs_with_a_certificate_for_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec_document: dict[str, Any]
) -> None:
    """People's own address is in the certificate too; ranks use it by the first name."""
    authority = Authority(tmp_path)
    pair = authority.issue("octet.example.com", "localhost")
    variables = {"OCTET_TLS_CERTIFICATE": str(pair.certificate), "OCTET_TLS_KEY": str(pair.key)}
    server = Server(tmp_path / "octet", variables=variables)
    monkeypatch.setenv("OCTET_CA_FILE", str(authority.file))
    server.client = Client(f"https://localhost:{server.port}", patience_s=LONG_S)
    server.start()
    try:
        job = server.client.submit(spec_document)
        assert server.finish(job.id).state is JobState.SUCCEEDED
    finally:
        server.stop()

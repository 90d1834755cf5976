"""schemathesis against a server with a key, in all its phases: boundary values, generated requests, sequences of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from tests.client.octet_app import API_KEY, OctetApp
from tests.service.conftest import POOLS

NUM_EXAMPLES = 20
MIN_CASES = 3_500
PHASES = "examples,coverage,fuzzing,stateful"
OF_OURS_ALONE = "unsupported_method,negative_data_rejection,positive_data_acceptance"
"""Checks that do not suit this API: its document describes less than it checks, as what cannot be combined."""


@pytest.mark.system
def test_no_phase_finds_anything(tmp_path: Path) -> None:
    """Streams have no end, and nothing is ready without a dispatcher: these two paths are left out."""
    with OctetApp(tmp_path / "data", pools=POOLS, api_keys=(SecretStr(API_KEY),)) as app:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{app.url}/openapi.json", "--phases", PHASES]
        command += ["--max-examples", str(NUM_EXAMPLES), "--seed", "1", "--header", f"Authorization: Bearer {API_KEY}"]
        command += [
            "--exclude-path",
            "/v1/stream",
            "--exclude-path",
            "/readyz",
            "--exclude-checks",
            OF_OURS_ALONE,
            "--suppress-health-check",
            "all",
        ]
        found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert found.returncode == 0, found.stdout[-20_000:]
    generated = re.search(r"(\d+) generated", found.stdout)
    assert generated is not None
    assert int(generated[1]) >= MIN_CASES

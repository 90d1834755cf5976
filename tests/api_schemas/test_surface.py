"""The contracts are frozen: a changed public name or schema fails here first. `make snapshots` writes new snapshots."""

import json
import os
from inspect import ismodule
from pathlib import Path

from octet import api_schemas
from octet.api_schemas import JobSpec, LaunchOrder, Problem, ReportBatch, ReportReply

HERE = Path(__file__).parent


def test_every_public_name_exists_and_none_is_missing() -> None:
    public = {name for name, value in vars(api_schemas).items() if not name.startswith("_") and not ismodule(value)}
    assert public == set(api_schemas.__all__)


def test_schemas_equal_the_snapshot() -> None:
    schemas = {
        contract.__name__: contract.model_json_schema()
        for contract in (JobSpec, LaunchOrder, Problem, ReportBatch, ReportReply)
    }
    snapshot = HERE / "schemas.json"
    current = json.dumps(schemas, indent=1, sort_keys=True) + "\n"
    if os.environ.get("OCTET_UPDATE_SNAPSHOTS"):
        snapshot.write_text(current)
    assert current == snapshot.read_text(), "a contract changed: run `make snapshots`, review the diff, note it in CHANGELOG.md"

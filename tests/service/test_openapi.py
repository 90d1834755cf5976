"""The OpenAPI document is frozen: a change of the API shows here first. `make snapshots` writes it again."""

import json
import os
import re
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

SNAPSHOT = Path(__file__).with_name("openapi.json")


def test_the_document_is_that_of_the_snapshot(openapi_document: dict[str, Any]) -> None:
    current = json.dumps(openapi_document, indent=1, sort_keys=True) + "\n"
    if os.environ.get("OCTET_UPDATE_SNAPSHOTS"):
        SNAPSHOT.write_text(current)
    assert current == SNAPSHOT.read_text(), "the API changed: run `make snapshots`, review the diff, note it in CHANGELOG.md"


def test_every_operation_has_an_id_a_tag_and_problem_answers(openapi_document: dict[str, Any]) -> None:
    assert openapi_document["openapi"].startswith("3.1")
    operations = [each for path in openapi_document["paths"].values() for each in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))
    for operation in operations:
        assert operation["tags"]
        for status, answer in operation["responses"].items():
            if status >= "400":
                assert answer["content"] == {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}


def test_nothing_is_referred_to_that_is_not_there(openapi_document: dict[str, Any]) -> None:
    def references(node: Any) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*[references(value) for value in node.values()])
        return set().union(*[references(value) for value in node]) if isinstance(node, list) else set()

    schemas = {f"#/components/schemas/{name}" for name in openapi_document["components"]["schemas"]}
    assert references(openapi_document) <= schemas


def test_another_method_is_answered_with_those_that_the_document_has(
    client: TestClient, openapi_document: dict[str, Any]
) -> None:
    for path, operations in openapi_document["paths"].items():
        answer = client.options(re.sub(r"\{\w+\}", "x", path))
        assert (answer.status_code, answer.headers["allow"]) == (405, ", ".join(sorted(map(str.upper, operations)))), path

"""Any JSON at any place of a job is valid or refused with reasons; nothing else is raised.

A validator that runs before the types has to take any value: `{"training": {"preset": {}}}` was an internal error.
"""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from octet.api_schemas import JobSpec, explain
from octet.api_schemas.accelerate import KEYS, NOT_APPLIED
from octet.api_schemas.data import DataSpec
from octet.api_schemas.models import FAMILIES
from octet.api_schemas.union import tagged_members

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
ANY_JSON = st.recursive(
    _SCALARS, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each, max_size=3), max_leaves=6
)
_OF_ACCELERATE = {("precision", name) for names in KEYS.values() for name in names}
_OF_ACCELERATE |= {("precision", name) for name in (*NOT_APPLIED, "fp8_config", "mixed_precision", "backend")}


@cache
def places() -> list[tuple[str, ...]]:
    """List the paths of all fields that a job can have, in any family and source, and those of Accelerate."""
    schema = JobSpec.model_json_schema()
    return sorted({*_places(schema, schema["$defs"], ()), *_OF_ACCELERATE})


def _places(schema: dict[str, Any], defs: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if "$ref" in schema:
        yield from _places(defs[schema["$ref"].rpartition("/")[2]], defs, path)
    for member in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _places(member, defs, path)
    for name, field in schema.get("properties", {}).items():
        yield (*path, name)
        if len(path) < 3:
            yield from _places(field, defs, (*path, name))


def with_value(document: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy with a value at a path. What is no mapping on the way is replaced."""
    name, *rest = path
    inner = document.get(name)
    inside = with_value(inner if isinstance(inner, dict) else {}, tuple(rest), value) if rest else value
    return {**document, name: inside}


def check(document: dict[str, Any]) -> None:
    try:
        JobSpec.model_validate_json(json.dumps(document))
    except ValidationError as error:
        violations = explain(error, JobSpec)
        assert violations
        assert all(violation.message for violation in violations)


@settings(max_examples=75, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=ANY_JSON)
def test_any_json_is_valid_or_refused(spec_document: dict[str, Any], data: st.DataObject, value: Any) -> None:
    document = spec_document
    for _ in range(data.draw(st.integers(1, 2))):
        document = with_value(document, data.draw(st.sampled_from(places())), value)
    check(document)


KINDS = {
    "job": ((), {}),
    **{f"family {name}": (("model",), {"model": {"family": name}}) for name in FAMILIES},
    **{f"source {name}": (("data",), {"data": {"source": name}}) for name in tagged_members(DataSpec)[1]},
    "augmentation": (("data", "augmentation"), {"data": {"source": "images", "augmentation": {}}}),
    "fp8_config": (("precision",), {"precision": {"fp8_config": {"backend": "te"}}}),
}
"""Parts of a job whose fields depend on others: each with its path, and what chooses it."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_place_takes_each_kind_of_json(spec_document: dict[str, Any], kind: str) -> None:
    below, chosen = KINDS[kind]
    failed = []
    for path in places():
        for value in (
            ({}, [[]], {"a": {"b": [{}]}}, 1.5, True, "x", "x" * 9999, None, 10**40) if path[: len(below)] == below else ()
        ):
            try:
                check(with_value(spec_document | chosen, path, value))
            except Exception as error:  # noqa: BLE001  every place is shown
                failed.append(f"{'.'.join(path)} {value!r}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)

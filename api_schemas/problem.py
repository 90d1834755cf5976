"""The one form of all error answers: RFC 9457, with a stable `code` and one entry per field to change."""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from octet.api_schemas.base import Contract, contract_in
from octet.api_schemas.intents import (
    advice_for_model,
    advice_for_name,
    advice_for_part,
    advice_for_value,
    example_of,
    presets,
    words_of_pattern,
    words_of_type,
)
from octet.api_schemas.job import JobSpec
from octet.api_schemas.union import annotation_of, tagged_members

CONTENT_TYPE = "application/problem+json"
_LONGEST_ECHO = 200


class ErrorCode(StrEnum):
    """Stable names of errors; programs branch on these."""

    INVALID_REQUEST = "invalid_request"
    INVALID_JSON = "invalid_json"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    ENTRYPOINT_NOT_ALLOWED = "entrypoint_not_allowed"
    ILLEGAL_TRANSITION = "illegal_transition"
    IDEMPOTENCY_MISMATCH = "idempotency_mismatch"
    STALE_ATTEMPT = "stale_attempt"
    SEQUENCE_GAP = "sequence_gap"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    WRONG_HOST = "wrong_host"
    TOO_MANY_REQUESTS = "too_many_requests"
    NOT_READY = "not_ready"
    INTERNAL = "internal"


class Violation(Contract):
    """One field that has to change."""

    field: str = Field(description="path of the field, such as training.steps; empty for the whole document")
    got: str
    allowed: str | None
    message: str


class Problem(Contract):
    """RFC 9457 problem document."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: ErrorCode
    instance: str | None = None
    errors: tuple[Violation, ...] = ()


def explain(error: ValidationError, root: type[BaseModel]) -> tuple[Violation, ...]:
    """List the violations in a document of type `root`: which field, what was got, what is allowed, what to change."""
    return explain_details(error.errors(include_url=False), root)


def explain_details(details: Iterable[Mapping[str, Any]], root: type[BaseModel]) -> tuple[Violation, ...]:
    """Do the same as `explain` for errors as pydantic lists them, without its exception."""
    return tuple(_explain_one(detail, root) for detail in details)


def _explain_one(detail: Mapping[str, Any], root: type[BaseModel]) -> Violation:
    context = detail.get("ctx", {})
    path, owner, part = _locate(root, detail["loc"])
    is_job = issubclass(root, JobSpec)
    got, allowed, message = _echo(detail.get("input")), None, str(detail["msg"])
    match detail["type"]:
        case "refused":
            path += [context["field"]] if context["field"] else []
            got, allowed, message = _echo(context["got"]), context["allowed"], context["change"]
        case "extra_forbidden":
            known = sorted(owner.model_fields) if owner else []
            allowed = ", ".join(known)
            advice = advice_for_name(path, detail.get("input"), root) if is_job else None
            change = f" {advice}" if advice else f"{_did_you_mean(path[-1], known, 0.65)} Remove it or correct its name."
            message = f"unknown field {path[-1]!r}.{change}"
        case "union_tag_invalid" if (preset := _unknown_preset(detail["input"])) is not None:
            path, got, allowed = [*path, "preset"], _echo(preset), ", ".join(presets())
            change = advice_for_value(path, preset) or f"{_did_you_mean(preset, presets())} {advice_for_model(preset)}".strip()
            message = f"no such preset. {change}"
        case "literal_error" | "enum" | "union_tag_invalid":
            if "tag" in context:
                path, got = [*path, _tag_field(owner, path)], _echo(context["tag"])
            expected = str(context.get("expected") or context["expected_tags"])
            choices = [choice.strip("' ") for choice in expected.replace(" or ", ", ").split(", ")]
            allowed = ", ".join(choices)
            given = context.get("tag", detail.get("input"))
            change = advice_for_value(path, given) or f"{_did_you_mean(str(given), choices)} Change {'.'.join(path)}.".strip()
            message = f"not one of the allowed values. {change}"
        case "missing":
            got, allowed = "nothing", "a value: the field is required"
            message = f"Set {'.'.join(path)}.{example_of(path)}"
        case "model_type" | "model_attributes_type":
            allowed = f"fields: {', '.join(sorted(part.model_fields))}" if part else "a mapping of fields"
            message = advice_for_part(path, detail.get("input")) or f"Change {'.'.join(path) or 'the document'}."
        case _:
            allowed, message = _wrong_value(detail, path, is_job)
    return Violation(field=".".join(path), got=got, allowed=allowed, message=_printable(message))


def _wrong_value(detail: Mapping[str, Any], path: list[str], is_job: bool) -> tuple[str, str]:
    """Return what is allowed in place of a value of the wrong type or size, and what to change."""
    given = detail.get("input")
    allowed = str(detail["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    words, change = words_of_type(detail["type"], path, given) if is_job else ("", None)
    if detail["type"] == "string_pattern_mismatch" and (meaning := words_of_pattern(path, is_job)):
        allowed = f"{meaning} (pattern {detail['ctx']['pattern']})"
    if detail["type"] == "too_short":
        words = f"a list of at least {detail['ctx']['min_length']}"
    change = advice_for_value(path, given) or change
    return words or allowed, change or f"Change {'.'.join(path) or 'the document'}."


def _locate(
    root: type[BaseModel], location: Sequence[str | int]
) -> tuple[list[str], type[BaseModel] | None, type[BaseModel] | None]:
    """Return a field's path as a user writes it, the model that owns its last part (None inside a list or dict), and its own.

    pydantic puts the tag of a union's member into the location; documents do not contain it.
    """
    path: list[str] = []
    owner: type[BaseModel] | None = None
    annotation: Any = root
    for part in location:
        tag_of, members = tagged_members(annotation)
        if tag_of is not None:
            annotation = members.get(str(part))
            continue
        path.append(_printable(str(part)))
        owner = contract_in(annotation)
        field = owner.model_fields.get(str(part)) if owner else None
        annotation = annotation_of(field) if field else None
    return path, owner, contract_in(annotation)


def _unknown_preset(given: Any) -> str | None:
    """Return the preset of a model that names no family and no preset of any; None for every other value."""
    is_hint = isinstance(given, Mapping) and not given.get("family") and isinstance(given.get("preset"), str)
    return str(given["preset"]) if is_hint else None


def _tag_field(owner: type[BaseModel] | None, path: list[str]) -> str:
    """Return the field that selects the member of the union at `path`."""
    assert owner is not None
    tag_of, _ = tagged_members(annotation_of(owner.model_fields[path[-1]]))
    assert tag_of is not None
    return tag_of.field


def _did_you_mean(got: str, choices: list[str], cutoff: float = 0.5) -> str:
    """Return a question that names the choice which was meant. cutoff: the least likeness, from 0 to 1."""
    by_folded = {choice.casefold(): choice for choice in choices}
    folded = got.casefold()
    letter_o = folded.replace("0", "o", 1)
    if folded not in by_folded and letter_o in by_folded:
        return f" Did you mean {by_folded[letter_o]!r}, with the letter O?"
    # YAML reads an unquoted 02 as the number 2.
    if got.isdigit() and f"o{got.lstrip('0')}" in by_folded:
        return f" Did you mean {by_folded['o' + got.lstrip('0')]!r}, the letter O and a digit?"
    close = difflib.get_close_matches(folded, list(by_folded), n=1, cutoff=cutoff)
    return f" Did you mean {by_folded[close[0]]!r}?" if close else ""


def _echo(value: Any) -> str:
    text = _printable(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_ECHO else f"{text[:_LONGEST_ECHO]}… ({len(text)} characters)"


def _printable(text: str) -> str:
    """Escape lone surrogates. JSON can contain half of a surrogate pair, but an answer in UTF-8 cannot."""
    return text.encode("utf-8", "backslashreplace").decode()

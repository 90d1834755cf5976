"""Job files: YAML or JSON, `-` for standard input, and the `--set key=value` that change them.

Plain scalars follow JSON's rules, not YAML 1.1's: `level: 02`, `name: on`, `name: 2026-01-31` and `name: 1:30` stay the
text that was written, and `3e-4` is a number. Aliases are refused, and so are documents far larger than a job: a few lines
of YAML can name billions of values.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from octet.api_schemas import JobSpec, explain
from octet.api_schemas.job import MAX_SPEC_BYTES, MAX_SPEC_VALUES
from octet.api_schemas.problem import explain_details
from octet.client.errors import JobFileError, SpecRefused

MAX_CHARACTERS = MAX_SPEC_BYTES
MAX_NODES = MAX_SPEC_VALUES
MAX_DEPTH = 50

_NULL = [("tag:yaml.org,2002:null", re.compile(r"(null|~|)$"))]
_BOOLEAN = [("tag:yaml.org,2002:bool", re.compile(r"(true|false)$"))]
_NUMBER = [
    ("tag:yaml.org,2002:int", re.compile(r"-?(0|[1-9][0-9]*)$")),
    ("tag:yaml.org,2002:float", re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?$")),
]


class _JsonScalars(yaml.SafeLoader):
    """YAML's layout with JSON's scalars; aliases, a key given twice and documents beyond the limits are errors."""

    yaml_implicit_resolvers = {  # noqa: RUF012  as the base class has it: by the first character of a scalar
        **{first: _NULL for first in ("n", "~", "")},
        **{first: _BOOLEAN for first in "tf"},
        **{first: _NUMBER for first in "-0123456789"},
    }

    _num_nodes = 0
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        self._num_nodes += 1
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem=f"the alias *{event.anchor}; write its value out", problem_mark=mark)
        if self._num_nodes > MAX_NODES or self._depth >= MAX_DEPTH:
            problem = f"more than {MAX_NODES} values, or {MAX_DEPTH} in one another; a job has some dozens"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for position, key in enumerate(keys):
            if key in keys[:position]:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def load_job_file(source: str) -> dict[str, Any]:
    """Read the document in a file, or on standard input for `-`. It is not validated. Raises JobFileError."""
    text = read_text(source, "a YAML or JSON file")
    try:
        document = _parse(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise JobFileError(f"{source} is neither YAML nor JSON: {error}") from error
    if not isinstance(document, dict):
        got = "nothing" if document is None else type(document).__name__
        raise JobFileError(f"{source} holds {got}; a job is a mapping with name, model, data and training.")
    return document


def read_text(source: str, wanted: str) -> str:
    """Read the text of a file or, for `-`, of standard input, and no more of it than a job may have. Raises JobFileError.

    wanted: what to give in the place of a file that cannot be read.
    """
    try:
        if source == "-":
            text = sys.stdin.read(MAX_CHARACTERS + 1)
        else:
            with Path(source).open(encoding="utf-8") as file:
                text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise JobFileError(f"cannot read {source}: {reason}. Give {wanted}, or - for stdin.") from error
    if len(text) > MAX_CHARACTERS:
        raise JobFileError(
            f"{source} has more than {MAX_CHARACTERS} characters, the most that the server reads. Give a job file."
        )
    return text


def apply_settings(document: dict[str, Any], settings: Sequence[str]) -> None:
    """Set `path.to.field=value` in a document, the value as in a job file: 4, O2, [0.9, 0.95], null. Raises JobFileError."""
    for setting in settings:
        path, equals, value = setting.partition("=")
        *parents, field = path.split(".")
        if not equals or not all([*parents, field]):
            raise JobFileError(f"--set got {setting!r}; allowed: path.to.field=value, such as training.steps=50.")
        target = document
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise JobFileError(f"--set {setting}: {parent} is {target!r}, which has no fields. Correct the path.")
        target[field] = parse_value(value, f"--set {setting}")


def check_part(document: dict[str, Any], source: str) -> None:
    """Validate the fields of a part of a job by themselves. Raises SpecRefused; rules that tie parts together come later."""
    stand_ins = {"name": "x", "model": "gpt-tiny"} | document
    stand_ins["data"] = {"path": "/data"} | stand_ins.get("data", {})
    training = stand_ins.get("training", {})
    if not {"steps", "epochs"} & training.keys():
        stand_ins["training"] = {"steps": 1} | training
    try:
        JobSpec.model_validate(stand_ins)
    except ValidationError as error:
        details = [detail for detail in error.errors(include_url=False) if detail["loc"]]
        if details:
            raise SpecRefused(source, explain_details(details, JobSpec)) from error


def parse_value(text: str, option: str) -> Any:
    """Read a value as a job file writes it. Raises JobFileError, which names the option."""
    try:
        return _parse(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise JobFileError(f"{option}: the value is no YAML: {error}") from error


def check_spec(document: dict[str, Any], source: str) -> JobSpec:
    """Validate the document as a job. Raises SpecRefused with the violations that the server would list too."""
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        raise SpecRefused(source, explain(error, JobSpec)) from error


def _parse(text: str) -> Any:
    try:
        return json.loads(text)  # YAML refuses the tabs that JSON allows
    except ValueError:
        return yaml.load(text, _JsonScalars)

"""Write the table of rules as the page docs/combinations.md.

`make snapshots` writes the page; a test holds it current.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import ValidationError

from octet.api_schemas.job import JobSpec
from octet.api_schemas.models import FAMILIES, Capabilities, FamilySpec
from octet.api_schemas.rules.parallelism import WHOLE_BATCHES
from octet.api_schemas.rules.rule import Amount, Condition, Field, Rule
from octet.api_schemas.rules.table import SECTIONS, SECTIONS_OF_PARTS

_HEAD = """# What can be combined

This page is written from the rules in `api_schemas/rules/` by `make snapshots`. The same rules refuse a job at submission, with
the field, what was got, what is allowed and what to change.
"""
_MODEL = {"preset": "llama-tiny", "num_layers": 8, "num_heads": 4, "num_key_value_heads": 4}
_MIXTURE = {"architecture": "mixtral", "config": {"vocab_size": 256, "num_local_experts": 8}}
_DATA = {"source": "tokens", "path": "/data/tokens"}
_TRAINING = {"steps": 8, "global_batch_size": 16, "sequence_length": 64, "gradient_clip": None}
_FIXED: Mapping[str, Any] = {"name": "pair", "model": _MODEL, "data": _DATA, "training": _TRAINING}


@dataclass(frozen=True)
class _Option:
    """An option of a job in the matrix. fields: by path, with what it always needs. needs_ranks: to divide something."""

    title: str
    fields: Mapping[str, Any]
    needs_ranks: bool = False


_OPTIONS = (
    _Option("tensor 2", {"parallelism.tensor": 2}),
    _Option("sequence", {"parallelism.tensor": 2, "parallelism.sequence": True}),
    _Option("context 2", {"parallelism.context": 2}),
    _Option("expert 2", {"parallelism.expert": 2, "model": _MIXTURE}),
    _Option("pipeline 2", {"parallelism.pipeline": 2}),
    _Option("interleaved", {"parallelism.pipeline": 2, "parallelism.schedule": "interleaved"}),
    *(_Option(f"ZeRO {stage}", {"parallelism.zero_stage": stage}, needs_ranks=True) for stage in (1, 2, 3)),
    _Option("min_workers", {"resources.min_workers": 1}, needs_ranks=True),
    _Option("adapter", {"adapter.rank": 16, "model": {"path": "/models/saved"}}),
    _Option("ema_decay", {"training.ema_decay": 0.999}),
    _Option("compile on", {"training.compile": "on"}),
    _Option("checkpointing", {"training.activation_checkpointing": "full"}),
    _Option("saved_activations", {"training.saved_activations": "fp8"}),
    _Option("residual_stream", {"training.residual_stream": "bf16"}),
    _Option("fused_loss", {"training.fused_loss": True}),
    _Option("gradient_release", {"training.gradient_release": True}),
    _Option("offload_optimizer", {"training.offload_optimizer": True}),
    _Option("attention fa3", {"training.attention_kernel": "fa3"}),
    _Option("sgd", {"training.optimizer.name": "sgd", "training.gradient_clip": 1.0}),
    *(_Option(level, {"precision.level": level}) for level in ("fp32", "fp16-amp", "bf16-amp", "te", "ao", "O2", "O3")),
)


def rules_as_page() -> str:
    """Return the page of docs/ as Markdown."""
    parts = [_HEAD, _pairs(), _families()]
    parts += [f"## {section}\n\n{_table(rules)}" for section, rules in _sections()]
    return "\n".join(parts)


def are_combined(first: _Option, second: _Option) -> bool | None:
    """Return True if a job may have both options; None if they set one field to two values."""
    if any(first.fields[path] != second.fields[path] for path in first.fields.keys() & second.fields.keys()):
        return None
    document: dict[str, Any] = {part: dict(value) if isinstance(value, dict) else value for part, value in _FIXED.items()}
    for path, value in {**first.fields, **second.fields}.items():
        *parents, name = path.split(".")
        holder = document
        for parent in parents:
            holder = holder.setdefault(parent, {})
        holder[name] = value
    degrees = document.get("parallelism", {})
    num_ranks = math.prod(degrees.get(degree, 1) for degree in ("tensor", "context", "pipeline", "expert"))
    resources = document.setdefault("resources", {})
    resources["workers"] = num_ranks * (2 if first.needs_ranks or second.needs_ranks else 1)
    if "min_workers" in resources:
        resources["min_workers"] = num_ranks
    document["training"]["micro_batch_size"] = 1 if degrees.get("pipeline", 1) > 1 else None
    try:
        JobSpec.model_validate(document)
    except ValidationError:
        return False
    return True


def _pairs() -> str:
    titles = [option.title for option in _OPTIONS]
    lines = [f"| | {' | '.join(titles)} |", f"| --- |{' --- |' * len(titles)}"]
    signs = {True: "✓", False: "✗", None: ""}
    for first in _OPTIONS:
        cells = ["" if first is second else signs[are_combined(first, second)] for second in _OPTIONS]
        lines.append(f"| {first.title} | {' | '.join(cells)} |")
    text = (
        "Each cell is a checked job with both options: of a llama that every degree divides; with adapter, of a saved "
        "model, and with expert, of a mixture."
    )
    return "\n".join(["## Two options", "", text, "", *lines, ""])


def _families() -> str:
    names = [field.name for field in fields(Capabilities)]
    lines = [f"| family | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    lines += [f"| `{name}` | {' | '.join(_cells(spec, names))} |" for name, spec in FAMILIES.items()]
    text = "What a family declares in its module of `api_schemas/models/`; `base.py` there has the meaning of each."
    more = "Some: it depends on the architecture, which `api_schemas/models/architectures.py` lists."
    return "\n".join(["## Families", "", f"{text}\n{more}", "", *lines, ""])


def _cells(spec: type[FamilySpec], names: list[str]) -> Iterator[str]:
    for name in names:
        is_able = getattr(spec.sizes_type.declared, name)
        yield ("some" if spec.architectures else "✓") if is_able else ""


def _sections() -> Iterator[tuple[str, tuple[Rule, ...]]]:
    yield from SECTIONS.items()
    yield from SECTIONS_OF_PARTS.items()


def _table(rules: tuple[Rule, ...]) -> str:
    lines = ["| field | when | allowed | why | change |", "| --- | --- | --- | --- | --- |"]
    for rule in rules:
        when = ", ".join(_words(condition) for condition in rule.when if condition not in WHOLE_BATCHES) or "always"
        texts = (_text(text, rule) for text in (rule.field, rule.allowed, rule.why, rule.change))
        field, *others = texts
        lines.append(f"| `{field.replace('`', '')}` | {' | '.join([when, *others])} |".replace("  ", " "))
    return "\n".join([*lines, ""])


def _text(text: str, rule: Rule) -> str:
    """Return a text of a rule without the values of a job: names of fields stand in their place."""
    value = rule.must.value
    name = value.name() if isinstance(value, Amount) else value.path if isinstance(value, Field) else str(value)
    text = text.replace("{name}, {value}", f"`{name}`").replace(", {value}", "").replace("{name}", name)
    text = text.replace("{value}", f"`{name}`").replace("{key}", "…")
    text = re.sub(r"\{([^}:!]+)[^}]*\}", r"`\1`", text)
    return re.sub(r"([\w.]+) `\1`", r"`\1`", text)


def _words(condition: Condition) -> str:
    path, relation, value = f"`{condition.path}`", condition.relation, condition.value
    if isinstance(value, Amount):
        return f"{path} is a {relation.replace(' of', '')} of `{value.name()}`"
    if isinstance(value, Field):
        return f"{path} {relation} `{value.path}`"
    if value is None:
        return f"{path} is set" if relation == "is not" else f"{path} is null"
    if isinstance(value, tuple):
        return f"{path} is {relation} {', '.join(map(str, value))}"
    shown = str(value).lower() if isinstance(value, bool) else value
    return f"{path} {relation} {shown}" if relation.startswith("is") else f"{path} is {relation} {shown}"

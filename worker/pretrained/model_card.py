"""Write the model card of an export, README.md: what it was made of, at what level, and how far it is from what was trained."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from octet.api_schemas import Files, JobSpec
from octet.api_schemas.export import Divergence, MismatchCard
from octet.worker.pretrained.adapter import WEIGHTS

CARD = "README.md"
_MOST_BYTES = 1 << 20


class Facts(NamedTuple):
    """The facts of a card besides the spec. evaluation: of the checkpoint, by name; empty where it was not evaluated.

    base_license: as `license_of` finds it.
    """

    step: int
    train_loss: float | None
    evaluation: Mapping[str, float]
    data: Mapping[str, float]
    base_license: str | None
    mismatch: MismatchCard | None


def license_of(folder: Path, files: Files) -> str | None:
    """Return the licence that the card or the configuration of a model's folder states; None where none does."""
    found = _head_of_card(folder, files).get("license")
    if not isinstance(found, str):
        try:
            config = json.loads(files.read(folder / "config.json", _MOST_BYTES))
        except (OSError, ValueError):
            return None
        found = config.get("license") if isinstance(config, dict) else None
    return found if isinstance(found, str) else None


def write_card(folder: Path, spec: JobSpec, facts: Facts) -> None:
    """Write README.md into an export's folder. Raises OSError."""
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["octet", f"level-{spec.precision.level}"]}
    if is_adapter := (folder / WEIGHTS).exists():
        assert spec.model.files is not None
        head |= {"library_name": "peft", "base_model": Path(spec.model.files).name}
        head["tags"].append("lora")
    if facts.base_license is not None:
        head["license"] = facts.base_license
    lines = [
        f"---\n{yaml.safe_dump(head, sort_keys=True)}---\n",
        f"# {spec.name}\n",
        f"{spec.model.title} ({spec.model.family}), trained by Octet at level {spec.precision.level}, "
        f"after step {facts.step:,}.\n",
        *_started_from(spec, facts),
        *_adapters(spec, is_adapter=is_adapter),
        *_losses(facts),
        *_data(spec, facts),
        *_mismatch(facts.mismatch),
        "## Job\n",
        f"```json\n{spec.model_dump_json(indent=1, exclude_defaults=True)}\n```\n",
    ]
    (folder / CARD).write_text("\n".join(lines))


def _started_from(spec: JobSpec, facts: Facts) -> list[str]:
    if spec.model.files is None:
        return ["It was trained from random values.\n"]
    license_name = facts.base_license or "not stated in its folder"
    return [f"It began from {Path(spec.model.files).name}; licence of that model: {license_name}.\n"]


def _adapters(spec: JobSpec, *, is_adapter: bool) -> list[str]:
    if spec.adapter is None:
        return []
    assert spec.model.files is not None
    form = f"LoRA of rank {spec.adapter.rank} and alpha {spec.adapter.alpha:g}"
    if not is_adapter:
        return [f"Its adapters, {form}, are merged into the weights.\n"]
    load = f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{Path(spec.model.files).name}"), FOLDER)'
    return [f"Adapters alone, {form}; the weights that they add to are those of that model.\n", f"```python\n{load}\n```\n"]


def _losses(facts: Facts) -> list[str]:
    rows = [] if facts.train_loss is None else [f"| training loss of the last step | {facts.train_loss:.6g} |"]
    rows += [f"| evaluation: {name} | {value:.6g} |" for name, value in facts.evaluation.items()]
    return ["## Losses\n", "Losses are in nats per target.\n", "| | |\n| --- | --- |", *rows, ""] if rows else []


def _data(spec: JobSpec, facts: Facts) -> list[str]:
    known = ", ".join(f"{name} {value:.10g}" for name, value in facts.data.items())
    held_out = "" if facts.mismatch is None else f" SHA-256 of the held-out samples below: {facts.mismatch.tokens_sha256}."
    return ["## Data\n", f"Source {spec.data.source}{f': {known}' if known else ''}.{held_out}\n"]


def _mismatch(card: MismatchCard | None) -> list[str]:
    if card is None:
        return []
    rows = [("trainer's evaluation, as served", card.evaluation), ("trained weights, as written", card.weights)]
    return [
        "## Mismatch\n",
        f"On {card.num_tokens:,} held-out tokens, from the files as a server reads them.\n",
        "| against | KL divergence, nats | same top token | largest difference of logits |\n| --- | --- | --- | --- |",
        *(_row(name, found) for name, found in rows),
        "",
    ]


def _row(name: str, found: Divergence) -> str:
    return f"| {name} | {found.kl_divergence:.3g} | {found.top1_agreement:.2%} | {found.largest_logit_difference:.3g} |"


def _head_of_card(folder: Path, files: Files) -> dict[str, Any]:
    """Return the YAML at the beginning of a folder's model card, or nothing."""
    try:
        text = files.read(folder / CARD, _MOST_BYTES).decode(errors="replace")
        head = yaml.safe_load(text.split("---\n", 2)[1]) if text.startswith("---\n") else None
    except (OSError, yaml.YAMLError, IndexError):
        return {}
    return head if isinstance(head, dict) else {}

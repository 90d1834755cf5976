"""The fields that a submission accepts are those of transformers: declared by a configuration, or read by a network's code."""

import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from octet.api_schemas.models import huggingface
from octet.api_schemas.models.architectures import TASKS
from octet.api_schemas.models.huggingface import CLOSED_FIELDS, CONFIG_FIELDS, HuggingFaceSpec, known_fields
from octet.worker.models.huggingface import fields_of, transformers

FILE = Path(huggingface.__file__).with_name(CONFIG_FIELDS)
NOT_OF_NETWORKS = CLOSED_FIELDS | {"transformers_version"}


def test_the_table_of_fields_is_transformers() -> None:
    """`make snapshots` writes it."""
    found = {name: fields_of(transformers().CONFIG_MAPPING[name]) - NOT_OF_NETWORKS for name in sorted(TASKS)}
    common = set.intersection(*found.values())
    table = {"all": " ".join(sorted(common))} | {name: " ".join(sorted(own - common)) for name, own in found.items()}
    if os.environ.get("OCTET_UPDATE_SNAPSHOTS"):
        FILE.write_text(json.dumps(table, indent=1) + "\n")
        known_fields.cache_clear()
    assert json.loads(FILE.read_text()) == table
    assert {"hidden_size", "num_labels"} <= known_fields("llama")


@pytest.mark.parametrize(
    ("architecture", "field"),
    [("qwen3_moe", "head_dim"), ("mixtral", "head_dim"), ("olmoe", "sliding_window"), ("deberta-v2", "share_att_key")],
)
def test_a_field_that_only_the_networks_code_reads_is_accepted(architecture: str, field: str) -> None:
    assert HuggingFaceSpec(architecture=architecture, config={"vocab_size": 256, field: 16}).config[field] == 16


def test_a_field_that_does_not_exist_is_refused_at_submission() -> None:
    with pytest.raises(ValidationError, match=r"hidden_act, hidden_size.* Did you mean 'hidden_size'") as refused:
        HuggingFaceSpec(architecture="llama", config={"vocab_size": 256, "hidden_sice": 64})
    assert refused.value.errors()[0]["ctx"]["field"] == "config.hidden_sice"

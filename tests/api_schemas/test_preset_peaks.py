"""Presets' peaks are shipped, and taken only for jobs for which they hold."""

from typing import Any

import pytest

from octet.api_schemas import JobSpec
from octet.api_schemas.levels import AUTOMATIC
from octet.api_schemas.models import PRESETS
from octet.api_schemas.peak import Peak
from octet.api_schemas.plan import PlanRequest, candidates, rows_of, traces_of
from octet.api_schemas.preset_peaks import preset_job, preset_peak


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_peak_whose_states_are_those_of_the_closed_form(preset: str) -> None:
    for level in AUTOMATIC:
        found = candidates(PlanRequest(job=preset_job(preset, level), levels=(level,)))
        assert not traces_of(found)
        (row,) = rows_of(found, [], [])
        assert row.peak_bytes is not None, level
        assert row.states_agree is True, level
        assert sum((row.peak_by_class or {}).values()) == row.peak_bytes


def changed(**parts: Any) -> Peak | None:
    document = preset_job("gpt-1.3b", "O2").model_dump(mode="json", exclude_unset=True)
    for part, fields in parts.items():
        document[part] = document.get(part, {}) | fields
    return preset_peak(JobSpec.model_validate(document))


def test_the_lines_serve_other_batches_learning_rates_and_lengths() -> None:
    own = changed()
    assert own is not None
    assert changed(training={"optimizer": {"learning_rate": 1e-3, "betas": (0.9, 0.999)}, "gradient_clip": 5.0}) == own
    assert changed(training={"sequence_length": 1024, "global_batch_size": 8}) == own
    wide = changed(training={"global_batch_size": 16})
    assert wide is not None
    assert own.bytes < wide.bytes == max(line.base + line.growth for line in wide.by_micro_batch) < 4 * own.bytes
    assert wide.largest_micro_batch(16, wide.bytes) == 16
    assert (wide.before, wide.held) == (own.before, own.held)


@pytest.mark.parametrize(
    "parts",
    [
        {"training": {"global_batch_size": 2}},  # fewer tokens than were traced
        {"training": {"global_batch_size": 8, "micro_batch_size": 4}},
        {"training": {"fused_loss": True}},
        {"training": {"gradient_clip": None}},
        {"training": {"optimizer": {"name": "lion"}}},
        {"model": {"num_layers": 12}},
        {"precision": {"exclude": ["*.mlp.*"]}},
        {"precision": {"level": "fp16-amp"}},
        {"resources": {"workers": 2}},
        {"data": {"source": "text", "path": "/data", "packing": True}},
    ],
)
def test_another_step_is_traced(parts: Any) -> None:
    assert changed(**parts) is None


def test_they_end_where_other_layers_gain_by_fp8() -> None:
    """Beyond 12,288 tokens llama-70b converts layers that it leaves in bf16 before."""
    documents = [preset_job("llama-70b", "te").model_dump(mode="json", exclude_unset=True) for _ in range(2)]
    documents[0]["training"]["global_batch_size"], documents[1]["training"]["global_batch_size"] = 6, 7
    within, beyond = (preset_peak(JobSpec.model_validate(document)) for document in documents)
    assert within is not None
    assert beyond is None

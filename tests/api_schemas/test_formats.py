"""The bytes of formats.py against live storage: of codecs, and of converted models with their optimizer after a step."""

from typing import get_args

import pytest
import torch
from torch import nn

from api_schemas.formats import (
    BLOCK,
    GRADIENT_FORMATS,
    MASTER_WEIGHT_FORMATS,
    MIN_QUANTIZED_ELEMENTS,
    STATE_FORMATS,
    STATES,
    WEIGHT_FORMATS,
    OptimizerName,
    converted_weight_bytes,
    plain_parameter_bytes,
)
from api_schemas.levels import LEVELS, Level
from api_schemas.training import OptimizerSpec
from worker import initialize, memory_report
from worker.fp8.operand import OperandScaling
from worker.kernels import formats
from worker.optim import build_optimizer
from worker.optim.codecs import CODECS, zeros

CPU = torch.device("cpu")
SIZES = (1, 127, 128, 129, 4095, 4096, 100_000)
CONVERTING = [name for name, row in LEVELS.items() if row.has_own_fp8]


def test_every_format_of_the_table_is_known() -> None:
    columns = {"weight": WEIGHT_FORMATS, "master_weight": MASTER_WEIGHT_FORMATS, "weight_gradient": GRADIENT_FORMATS}
    columns |= {"exp_avg": STATE_FORMATS, "exp_avg_sq": STATE_FORMATS}
    for column, known in columns.items():
        assert set(known) == set(get_args(Level.model_fields[column].annotation)), column
    assert set(STATES) == set(get_args(OptimizerName)) == set(get_args(OptimizerSpec.model_fields["name"].annotation))
    assert BLOCK == formats.BLOCK


@pytest.mark.parametrize("codec", STATE_FORMATS)
def test_states_are_what_codecs_store(codec: str) -> None:
    assert set(STATE_FORMATS) == set(CODECS)
    for num_elements in SIZES:
        live = {name: part.untyped_storage().nbytes() for name, part in zeros(CODECS[codec], num_elements, CPU).items()}
        scale_bytes = live.pop("dequant_scale", 0)
        assert STATE_FORMATS[codec].num_scale_bytes(num_elements) == scale_bytes
        assert STATE_FORMATS[codec].num_code_bytes(num_elements) == sum(live.values())
        assert STATE_FORMATS[codec].num_bytes(num_elements) == CODECS[codec].num_bytes(num_elements)


@pytest.mark.parametrize("optimizer_name", STATES)
@pytest.mark.parametrize("level", CONVERTING)
def test_a_converted_weight(level: str, optimizer_name: OptimizerName) -> None:
    for num_elements in SIZES:
        model = nn.Linear(num_elements, 1, bias=False)
        optimizer = build_optimizer([{"params": model.parameters()}], OptimizerSpec(name=optimizer_name))
        model, stepped = initialize(model, optimizer, level, statistics_every=0)
        assert stepped is not None
        model(torch.ones(16, num_elements)).sum().backward()
        stepped.step()
        live = memory_report(model, stepped, converted_only=True)
        live["other"] -= sum(
            buffer.untyped_storage().nbytes()
            for scaling in model.modules()
            if isinstance(scaling, OperandScaling)
            for buffer in scaling.buffers()
        )
        assert converted_weight_bytes(LEVELS[level], num_elements, optimizer_name) == live, num_elements


@pytest.mark.parametrize("level", LEVELS)
def test_a_plain_parameter(level: str) -> None:
    """An embedding, which no level converts."""
    for num_elements in SIZES:
        model = nn.Embedding(num_elements, 1)
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), level)
        assert optimizer is not None
        model(torch.zeros(1, dtype=torch.long)).sum().backward()
        optimizer.step()
        live = memory_report(model, optimizer)
        live["other"] = 0  # the state of loss scaling
        assert plain_parameter_bytes(LEVELS[level], num_elements) == live


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_the_promise_of_a_level_is_the_sum_of_its_formats(level: Level) -> None:
    for num_elements in (MIN_QUANTIZED_ELEMENTS * 16, 4096 * 4096):
        per_parameter = sum(converted_weight_bytes(level, num_elements).values()) / num_elements
        assert level.bytes_per_parameter - 0.2 <= per_parameter <= level.bytes_per_parameter

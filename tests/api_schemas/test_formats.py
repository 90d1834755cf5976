"""The bytes of formats.py against live storage: of codecs, and of converted models with their optimizer after a step."""

from collections import Counter
from typing import get_args

import pytest
import torch
from torch import nn

from octet.api_schemas.formats import (
    BLOCK,
    GRADIENT_FORMATS,
    MASTER_WEIGHT_FORMATS,
    MIN_QUANTIZED_ELEMENTS,
    STATE_FORMATS,
    WEIGHT_FORMATS,
    gradient_bytes,
    moment_bytes,
    weight_bytes,
)
from octet.api_schemas.levels import LEVELS, Level
from octet.api_schemas.optimization import OPTIMIZER_STATES, OptimizerName, OptimizerSpec
from octet.api_schemas.planned_states import CLASSES
from octet.worker import initialize, memory_report
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.operand import OperandScaling
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.fp8.weight import Float8Weight, stored
from octet.worker.fp8.weights import encode_weight
from octet.worker.kernels import formats
from octet.worker.optim import Hyperparameters, LowBitAdamW, build_optimizer
from octet.worker.optim.codecs import CODECS, zeros

CPU = torch.device("cpu")
SIZES = (1, 127, 128, 129, 4095, 4096, 100_000)
SHAPES = ((16, 17), (63, 65), (64, 64), (17, 241), (250, 400))
CONVERTING = [name for name, row in LEVELS.items() if row.has_own_fp8]


def parameter_bytes(
    level: Level, num_elements: int, is_converted: bool, optimizer: OptimizerName = "adamw", *, is_matrix: bool = False
) -> dict[str, int]:
    """Add up the parts of a parameter on one rank."""
    found = Counter(dict.fromkeys(CLASSES, 0))
    found.update(weight_bytes(level, is_converted, num_elements, num_elements))
    found.update(gradient_bytes(level.weight_gradient if is_converted else "fp32", num_elements))
    found.update(moment_bytes(level, optimizer, num_elements, num_elements, is_matrix=is_matrix))
    return dict(found)


def test_every_format_of_the_table_is_known() -> None:
    columns = {"weight": WEIGHT_FORMATS, "master_weight": MASTER_WEIGHT_FORMATS, "weight_gradient": GRADIENT_FORMATS}
    columns |= {"exp_avg": STATE_FORMATS, "exp_avg_sq": STATE_FORMATS}
    for column, known in columns.items():
        assert set(known) == set(get_args(Level.model_fields[column].annotation)), column
    assert set(OPTIMIZER_STATES) == set(get_args(OptimizerName))
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


@pytest.mark.parametrize("level", CONVERTING)
def test_a_weight_and_its_gradient_of_any_size(level: str) -> None:
    """The optimizer's own storage, without a layer: FP8 products need at least 16 features."""
    row = LEVELS[level]
    for num_elements in SIZES:
        values = torch.ones(num_elements)
        parameter = nn.Parameter(values)
        encoded = encode_weight(values, row)
        live = dict.fromkeys(CLASSES, 0)
        if encoded is not None:
            weight = Float8Weight(*encoded)
            weight.state.wide = values if row.master_weight == "fp16+scale" else None
            parameter = nn.Parameter(weight)
            live["scales"] += num_bytes(encoded.dequant_scale)
            live["other"] += num_bytes(encoded.amax)
            live["master_weights"] += num_bytes(encoded.residual)
        live["weights"] += num_bytes(stored(parameter))
        gradient = Float8Gradient.quantize(values, RoundingPosition(0, 0)) if row.weight_gradient == "fp8" else values
        live["gradients"] += num_bytes(gradient.codes if isinstance(gradient, Float8Gradient) else gradient)
        live["scales"] += num_bytes(gradient.dequant_scale) if isinstance(gradient, Float8Gradient) else 0
        defaults = Hyperparameters(exp_avg_codec=row.exp_avg, exp_avg_sq_codec=row.exp_avg_sq)
        states = LowBitAdamW([parameter], defaults).state[parameter]
        for kind in ("exp_avg", "exp_avg_sq", "master_weights"):
            for name, part in states.get(kind, {}).items():
                live["scales" if name == "dequant_scale" else kind] += num_bytes(part)
        assert parameter_bytes(row, num_elements, True) == live, num_elements


def num_bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("optimizer_name", OPTIMIZER_STATES)
@pytest.mark.parametrize("level", CONVERTING)
def test_a_converted_weight(level: str, optimizer_name: OptimizerName) -> None:
    for out_features, in_features in SHAPES:
        num_elements = out_features * in_features
        model = nn.Linear(in_features, out_features, bias=False)
        optimizer = build_optimizer([{"params": model.parameters()}], OptimizerSpec(name=optimizer_name))
        model, stepped = initialize(model, optimizer, level, statistics_every=0)
        assert stepped is not None
        model(torch.ones(16, in_features)).sum().backward()
        stepped.step()
        live = memory_report(model, stepped, converted_only=True)
        live["other"] -= sum(
            buffer.untyped_storage().nbytes()
            for scaling in model.modules()
            if isinstance(scaling, OperandScaling)
            for buffer in scaling.buffers()
        )
        planned = parameter_bytes(LEVELS[level], num_elements, True, optimizer_name, is_matrix=True)
        assert planned == live, num_elements


@pytest.mark.filterwarnings("ignore:nothing was converted")
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
        assert parameter_bytes(LEVELS[level], num_elements, False) == live


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_the_promise_of_a_level_is_the_sum_of_its_formats(level: Level) -> None:
    for num_elements in (MIN_QUANTIZED_ELEMENTS * 16, 4096 * 4096):
        per_parameter = sum(parameter_bytes(level, num_elements, True).values()) / num_elements
        assert level.bytes_per_parameter - 0.2 <= per_parameter <= level.bytes_per_parameter

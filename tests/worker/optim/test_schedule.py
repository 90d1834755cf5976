"""Learning rates against torch's own schedulers, and which parameters decay and learn how fast."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedules

from octet.api_schemas import OptimizerSpec, ScheduleSpec
from octet.api_schemas.models.deit import DeiTSpec
from octet.api_schemas.models.gpt import GPTSpec
from octet.worker.common.errors import InvalidConfig
from octet.worker.models import build_model
from octet.worker.optim.schedule import learning_rate_at, parameter_groups, set_learning_rate

PEAK, NUM_STEPS, WARMUP = 0.3, 50, 10


def rates_of_torch(after_warmup: Any) -> list[float]:
    """Return the rates of a warm-up followed by a schedule of torch, made from its optimizer."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    warmup = torch_schedules.LinearLR(optimizer, start_factor=1 / WARMUP, total_iters=WARMUP - 1)
    schedule = torch_schedules.SequentialLR(optimizer, [warmup, after_warmup(optimizer)], milestones=[WARMUP])
    rates = []
    for _ in range(NUM_STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


LEFT = NUM_STEPS - 1 - WARMUP


@pytest.mark.parametrize(
    ("spec", "of_torch"),
    [
        ({"name": "cosine", "final_fraction": 0.1}, lambda o: torch_schedules.CosineAnnealingLR(o, LEFT, PEAK * 0.1)),
        ({"name": "linear", "final_fraction": 0.1}, lambda o: torch_schedules.LinearLR(o, 1.0, 0.1, LEFT)),
        ({"name": "constant"}, lambda o: torch_schedules.ConstantLR(o, 1.0)),
        ({"name": "polynomial", "final_fraction": 0.0, "power": 2}, lambda o: torch_schedules.PolynomialLR(o, LEFT, 2)),
        (
            {"name": "warmup_stable_decay", "final_fraction": 0.2, "decay_fraction": 0.4},
            lambda o: torch_schedules.LambdaLR(o, lambda step: 1.0 - 0.8 * max(0, step - (LEFT - 20)) / 20),
        ),
    ],
    ids=lambda case: case["name"] if isinstance(case, dict) else "",
)
def test_rates_are_torchs(spec: dict[str, Any], of_torch: Any) -> None:
    schedule = ScheduleSpec.model_validate({"warmup_steps": WARMUP, **spec})
    ours = [learning_rate_at(step, PEAK, schedule, NUM_STEPS) for step in range(NUM_STEPS)]
    assert ours == pytest.approx(rates_of_torch(of_torch), rel=1e-9, abs=1e-12)


def test_what_is_named_does_not_decay() -> None:
    model = build_model(DeiTSpec(preset="deit-tiny", num_layers=1), seed=0)
    spec = OptimizerSpec(weight_decay=0.2, no_decay=("*cls_token", "*position_embeddings"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = parameter_groups(model, spec)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.2, 0.0)
    found = {names[id(parameter)] for parameter in others["params"]}
    assert {name for name in found if not name.endswith("bias") and "norm" not in name} == {
        "network.vit.embeddings.cls_token",
        "network.vit.embeddings.position_embeddings",
    }
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    with pytest.raises(InvalidConfig, match="'\\*positions', which names no parameter"):
        parameter_groups(model, OptimizerSpec(no_decay=("*positions",)))


def test_lower_layers_learn_more_slowly() -> None:
    model = build_model(GPTSpec(hidden_size=32, num_layers=2, num_heads=2, vocab_size=256, max_sequence_length=16), seed=0)
    groups = parameter_groups(model, OptimizerSpec(layer_decay=0.5))
    optimizer = torch.optim.AdamW(groups)
    set_learning_rate(optimizer, 1.0)
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    by_name = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert by_name["token_embedding.weight"] == by_name["position_embedding.weight"] == 0.125
    assert by_name["blocks.0.mlp.up.weight"] == by_name["blocks.0.mlp_norm.bias"] == 0.25
    assert by_name["blocks.1.attention.qkv.weight"] == 0.5
    assert by_name["final_norm.weight"] == 1.0
    with pytest.raises(InvalidConfig, match="repeated blocks"):
        parameter_groups(nn.Linear(2, 2), OptimizerSpec(layer_decay=0.5))

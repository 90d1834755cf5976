"""An average of a model that ranks divide is the average of its values, as precisely as the ranks hold them together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import swa_utils

from octet import AveragedModel, follow_optimizer, load_pretrained, parallelize, plain_state_dict
from tests.kit.ports import free_port
from tests.kit.pretrained_models import TOKENS, logits_of, their_llama
from tests.kit.ranks import refusal_of, run_ranks, saved_by_ranks

LEVELS = ("bf16-amp", "O2", "O3", "O3-split")
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "tensor": {"tensor": 2},
}
DECAY, NUM_STEPS = 0.8, 3
Values = dict[str, Tensor]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-2)


def average_of(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, after_step: Callable[[], None]) -> Values:
    """Train some steps; return the average, by hand, of what `plain_state_dict` reads after each."""
    expected: Values = {}
    for _ in range(NUM_STEPS):
        nn.functional.cross_entropy(logits_of(model).float().flatten(0, 1), TOKENS.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()
        for name, value in plain_state_dict(model).items():
            expected[name] = expected[name].lerp(value, 1 - DECAY) if name in expected else value.clone()
    return expected


def train_by_parallelize(folder: str, level: str, layout: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = load_pretrained(folder, level, make_optimizer=adamw)
    assert optimizer is not None
    average = average_of(model)
    parallel = parallelize(model, optimizer, **layout)
    of_a_part = average_of_norm(parallel.model) if "zero_stage" in layout else None

    def update() -> None:
        average.update_parameters(parallel.model)
        if of_a_part is not None:
            of_a_part.update_parameters(parallel.model.get_submodule("model.norm"))

    expected = train(parallel.model, parallel.optimizer, update)
    found = plain_state_dict(average.module)
    if of_a_part is not None:
        found["part"] = plain_state_dict(of_a_part.module)["weight"]
        expected["part"] = expected["model.norm.weight"]
    return {"expected": expected, "found": found, "refusal": refusal_of(lambda: average_of(parallel.model))}


def average_of_norm(model: nn.Module) -> AveragedModel:
    return average_of(model.get_submodule("model.norm"))


def train_by_fsdp(folder: str, level: str, *, is_divided: bool) -> dict[str, Any]:
    model: Any = load_pretrained(folder, level)[0]
    average: Any = average_of(model)
    for whole in (model, average.module) if is_divided else (model,):
        for part in (*whole.model.layers, whole):
            fully_shard(part)
    optimizer = adamw(model)
    follow_optimizer(model, optimizer)
    expected = train(model, optimizer, lambda: average.update_parameters(model))
    found = plain_state_dict(average.module)
    return {"expected": expected, "found": found, "refusal": refusal_of(lambda: average_of(model))}


def on_ranks(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = f"{folder}/model"
    found: dict[str, Any] = {}
    for level in LEVELS:
        for name, layout in LAYOUTS.items():
            found[f"{name} {level}"] = train_by_parallelize(model, level, layout)
        found[f"fsdp2 {level}"] = train_by_fsdp(model, level, is_divided=False)
        found[f"fsdp2, divided too {level}"] = train_by_fsdp(model, level, is_divided=True)
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("averages")
    their_llama().save_pretrained(folder / "model")
    run_ranks(on_ranks, (free_port(), str(folder)), 2)
    return saved_by_ranks(folder, 2)


@pytest.mark.system
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "fsdp2", "fsdp2, divided too"])
def test_the_average_is_that_of_the_values_that_ranks_hold_together(
    results: list[dict[str, Any]], layout: str, level: str
) -> None:
    for of_rank in results:
        found, expected = of_rank[f"{layout} {level}"]["found"], of_rank[f"{layout} {level}"]["expected"]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.system
def test_a_model_that_has_no_copy_is_refused_with_what_to_do(results: list[dict[str, Any]]) -> None:
    refusals = {name: result["refusal"] for name, result in results[0].items()}
    assert "Make the average before it." in refusals["fsdp2 O2"]
    for name in ("zero 3 O2", "zero 1 O3-split", "tensor O2"):
        assert refusals[name].endswith("allowed: a model before parallelize. Make the average before it."), refusals[name]

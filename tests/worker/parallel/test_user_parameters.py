"""Do with `model.parameters()` what people do, on ranks that divide masters and residuals (ZeRO): no write loses digits.

A read that only one rank makes cannot have them: it gives the values of codes, with a warning that says how to read all digits.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from octet import parallelize, plain_state_dict
from octet.worker.fp8.weight import is_float8_weight
from octet.worker.parallel import Parallel
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks
from tests.kit.small_model import Small, make
from tests.worker.prepare.test_user_parameters import READS, ROUNDING, WRITES, Result

LEVELS = [
    *("O2", "O3", "O3-split"),
    *(pytest.param(level, marks=pytest.mark.matrix) for level in ("bf16-amp", "te", "O1", "O2-8bit")),
]
COARSE = ("O3", "O3-split")
CODES_OF_E4M3 = 0.04
"""Largest relative error of a whole weight's E4M3 codes."""
OF_READ_VALUES = {"soup", "Lookahead", "target network", "target network in place"}
"""Actions that write values which they have read before: digits of codes where ranks hold the rest."""
REFUSED = {
    "L2 penalty": "this gradient is divided over the ranks (ZeRO): no rank holds it",
    "target network": "divided over the ranks (ZeRO); allowed: copies of models that hold them",
    "target network in place": "divided over the ranks (ZeRO); allowed: copies of models that hold them",
    "timm": "divided over the ranks (ZeRO); allowed: copies of models that hold them",
    "soup": "divided over the ranks (ZeRO); allowed: copies of models that hold them",
    "AveragedModel of torch": "divided over the ranks (ZeRO); allowed: copies of models that hold them",
}
MOVES_MEMORY = {"data =", "vector_to_parameters"}
"""Actions that give a plain parameter other memory than the ranks' machinery has, which the next step refuses."""
AT_ZERO_2 = ("mul_, 100 times", "a row")
ACTIONS = {name: do for name, do in (READS | WRITES).items() if name != "replaced"}


def prepared(level: str, stage: int) -> Parallel:
    """A model that was trained for a step."""
    parallel = parallelize(*make(level), zero_stage=stage)
    step(parallel, 1)
    parallel.optimizer.zero_grad()
    return parallel


def step(parallel: Parallel, seed: int) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    parallel.model(x).square().mean().backward()
    parallel.optimizer.step()


def error_of(found: Result, expected: Result) -> float:
    errors = [
        float((one.detach().float() + 0 - other.detach()).norm() / other.detach().norm().clamp(min=1e-3))
        for one, other in zip(found, expected, strict=True)
    ]
    return max(errors)


def parameters_of(model: nn.Module) -> list[Tensor]:
    """All digits."""
    state = plain_state_dict(model)
    return [state[name] for name, _ in model.named_parameters()]


def act(name: str, level: str, stage: int) -> dict[str, Any]:
    """Do a thing on a divided model and on a plain one of its values; return the errors, and if there was a warning."""
    parallel, plain = prepared(level, stage), Small()
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), parameters_of(parallel.model), strict=True):
            parameter.copy_(value)
    expected = ACTIONS[name](plain)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            read = error_of(ACTIONS[name](parallel.model), expected)
        except ValueError as error:
            return {"refused": str(error)}
    warned_of_codes = any("ranks divide (ZeRO)" in str(each.message) for each in warned)
    written = error_of(parameters_of(parallel.model), list(plain.parameters()))
    found = {"read": read, "warned": warned_of_codes, "written": written}
    if name in WRITES and name not in MOVES_MEMORY:
        for group in parallel.optimizer.param_groups:
            group["lr"] = 0.0
        parallel.optimizer.zero_grad()
        step(parallel, 2)
        found["stepped"] = error_of(parameters_of(parallel.model), list(plain.parameters()))
        found["waiting"] = sum(is_float8_weight(each) and each.state.wide is not None for each in parallel.model.parameters())
    return found


def on_ranks(rank: int, port: int, folder: str, levels: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = {f"{name} {level} 1": act(name, level, 1) for level in levels for name in ACTIONS}
    found |= {f"{name} {level} 2": act(name, level, 2) for level in levels for name in AT_ZERO_2}
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Each rank's results at the levels of the selected tests."""
    folder = tmp_path_factory.mktemp("user-parameters")
    own = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    run_ranks(on_ranks, (free_port(), str(folder), sorted({item.callspec.params["level"] for item in own})), 2)
    return saved_by_ranks(folder, 2)


@pytest.mark.system
@pytest.mark.parametrize("level", LEVELS)
def test_no_rank_reads_other_values_without_a_warning(results: list[dict[str, Any]], level: str) -> None:
    for of_rank in results:
        for name in READS:
            found = of_rank[f"{name} {level} 1"]
            if "refused" in found:
                assert REFUSED[name] in found["refused"]
            elif name not in ("MAML", "histogram"):  # numbers that are no values
                assert found["read"] <= 1e-5 or (level in COARSE and found["warned"] and found["read"] < CODES_OF_E4M3), name


@pytest.mark.system
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_written_has_all_digits_before_and_after_the_next_step(results: list[dict[str, Any]], level: str) -> None:
    for of_rank in results:
        written = [(name, 1) for name in WRITES if name in ACTIONS] + [(name, 2) for name in AT_ZERO_2]
        for action, stage in written:
            name = f"{action} {level} {stage}"
            found = of_rank[name]
            if "refused" in found:
                assert level == "O3-split", name
                assert REFUSED[action] in found["refused"]
            elif level in COARSE and action in OF_READ_VALUES | {"vector_to_parameters"}:
                assert found["warned"], name
                assert found["written"] < CODES_OF_E4M3, name
            else:
                assert max(found["written"], found.get("stepped", 0.0)) < ROUNDING["codes"], name
                assert not found.get("waiting"), name

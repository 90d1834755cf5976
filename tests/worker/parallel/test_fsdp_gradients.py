"""Gradients of weights of codes that FSDP2 sends in FP8: the bits of ZeRO 3, counted bytes, and what is refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from octet import follow_optimizer, initialize, plain_state_dict
from octet.worker.common.config import RankEnv
from octet.worker.fp8.fsdp_gradients import send_gradients_in_fp8
from octet.worker.mesh import Mesh
from octet.worker.mesh.axes import Axes
from octet.worker.parallel import Parallel
from tests.kit.ports import free_port
from tests.kit.ranks import refusal_of, run_ranks, saved_by_ranks
from tests.worker.parallel.test_fsdp import HIDDEN, NUM_STEPS, ROWS, WIDTH, Net, drawn, loss_of, sharded, train

LEVELS = ("O1", "O2", "O3", "O3-split", "O2-8bit")
pytestmark = pytest.mark.system


def made(level: str, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A model whose gradients travel in FP8, and our optimizer of its shards."""
    model, optimizer = sharded(level, "adamw", **options)
    follow_optimizer(model, optimizer, gradients="fp8")
    return model, optimizer


def train_by_zero3(level: str, mesh: Mesh, rank: int) -> dict[str, Any]:
    """With gradients in FP8, as it is by default."""
    net = drawn()
    model, optimizer = initialize(net, torch.optim.AdamW(net.parameters(), lr=1e-2), level, convert_heads=True)
    parallel = Parallel(model, optimizer, Axes.of_data(mesh.data), zero_stage=3)  # type: ignore[arg-type]  # ours
    losses = []
    for step in range(NUM_STEPS):
        losses.append(loss_of(parallel.model, rank, step))
        losses[-1].backward()
        parallel.synchronize()
        parallel.optimizer.step()
        parallel.publish()
    return {"losses": [float(loss.detach()) for loss in losses], "plain": plain_state_dict(model)}


@contextmanager
def counted_exchanges() -> Iterator[list[tuple[str, torch.dtype, int]]]:
    """Collect the collectives by which gradients travel: name, dtype, and the bytes that this rank gives."""
    sent: list[tuple[str, torch.dtype, int]] = []

    def counting(name: str) -> Callable[..., Any]:
        run = getattr(dist, name)

        def count(output: Tensor, input: Tensor, *rest: Any, **options: Any) -> Any:
            sent.append((name, input.dtype, input.nbytes))
            return run(output, input, *rest, **options)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all_single", "reduce_scatter_single", "reduce_scatter_tensor"):
            if hasattr(dist, name):
                patch.setattr(dist, name, counting(name))
        yield sent


def unused(rank: int) -> None:
    class Idle(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0].up(x)

    model: Any = initialize(Idle(HIDDEN), None, "O2", convert_heads=True)[0]
    torch.distributed.fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    follow_optimizer(model, optimizer, gradients="fp8")
    loss_of(model, rank, 0).backward()


def refusals(rank: int) -> dict[str, str]:
    def of_values() -> None:
        model, optimizer = sharded("te", "adamw")
        follow_optimizer(model, optimizer, gradients="fp8")

    def in_bf16() -> None:
        loss_of(made("O2", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))[0], rank, 0).backward()

    def another_word() -> None:
        model, optimizer = sharded("O2", "adamw")
        follow_optimizer(model, optimizer, gradients="bf16")  # type: ignore[arg-type]

    calls = {"of values": of_values, "in bf16": in_bf16, "another word": another_word, "unused": lambda: unused(rank)}
    return {name: refusal_of(call) for name, call in calls.items()}


def read_within_a_pass(rank: int) -> dict[str, bool]:
    """Read all digits of E4M3 weights while FSDP2 has gathered the last layer, and go on with the pass."""
    found, trained = {}, []
    for is_read in (False, True):
        model, optimizer = made("O3")
        train(model, optimizer, rank, range(1))
        before = {name: value.clone() for name, value in plain_state_dict(model).items()}
        loss = loss_of(model, rank, 1)
        if is_read:
            within = plain_state_dict(model)
            found["values"] = all(torch.equal(within[name], value) for name, value in before.items())
        loss.backward()
        optimizer.step()
        trained.append(plain_state_dict(model))
    found["goes on"] = all(torch.equal(trained[1][name], value) for name, value in trained[0].items())
    return found


def work(rank: int, num_ranks: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with Mesh(RankEnv(rank=rank, world_size=num_ranks, master_port=port), torch.device("cpu")) as mesh:
        for level in LEVELS:
            model, optimizer = made(level)
            with counted_exchanges() as sent:
                losses = train(model, optimizer, rank, range(NUM_STEPS))
            found[level] = {"losses": losses, "plain": plain_state_dict(model), "sent": sent}
            found[level]["zero3"] = train_by_zero3(level, mesh, rank)
        model, optimizer = made("O3")
        train(model, optimizer, rank, range(1))
        before = {name: value.clone() for name, value in plain_state_dict(model).items()}
        loss = loss_of(model, rank, 1) * (torch.inf if rank == 0 else 1.0)
        loss.backward()
        optimizer.step()
        after = plain_state_dict(model)
        found["skipped"] = all(torch.equal(after[name], value) for name, value in before.items())
        found["read"] = read_within_a_pass(rank)
        found["refused"] = refusals(rank)
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.matrix)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fsdp-gradients")
    run_ranks(work, (request.param, free_port(), str(folder)), request.param)
    return saved_by_ranks(Path(folder), request.param)


@pytest.mark.parametrize("level", LEVELS)
def test_the_bits_are_those_of_zero_3(level: str, found: list[dict[str, Any]]) -> None:
    for result in found:
        held, expected = result[level], result[level]["zero3"]
        assert held["losses"] == expected["losses"]
        for name, values in expected["plain"].items():
            assert torch.equal(held["plain"][name], values), name


@pytest.mark.parametrize("level", LEVELS)
def test_codes_are_what_is_sent(level: str, found: list[dict[str, Any]]) -> None:
    """A byte for an element of a weight, four for one of a bias, padded to whole rows on each rank."""
    num_ranks = len(found)
    padded = -(-ROWS // num_ranks) * num_ranks
    weights, biases = 2 * 2 * WIDTH * HIDDEN + padded * WIDTH, 2 * HIDDEN + padded
    for result in found:
        assert {name for name, _, _ in result[level]["sent"]} == {"all_to_all_single"}
        assert sum(num_bytes for _, _, num_bytes in result[level]["sent"]) == NUM_STEPS * (weights + 4 * biases)


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(found: list[dict[str, Any]]) -> None:
    assert all(result["skipped"] for result in found)


def test_all_digits_are_read_within_a_pass(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert result["read"] == {"values": True, "goes on": True}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("of values", "fully_shard has cut no weight of codes; allowed: models of O1, O2, O3"),
        ("in bf16", "allowed with gradients='fp8': fp32 and means. Leave out reduce_dtype"),
        ("another word", "gradients is 'bf16'; allowed: fp32, fp8"),
        ("unused", "allowed with gradients='fp8': a gradient for each parameter"),
    ],
)
def test_what_cannot_work_is_refused(name: str, said: str, found: list[dict[str, Any]]) -> None:
    for result in found:
        assert said in result["refused"][name]


def test_a_model_that_is_not_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="fully_shard has cut no weight of codes"):
        send_gradients_in_fp8(nn.Linear(2, 2))

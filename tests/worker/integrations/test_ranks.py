"""Trainers of others on two ranks: transformers' Trainer through `octet.parallelize`, Accelerate's DDP, torch's FSDP2."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from octet import initialize
from tests.kit.gathers import counted_gathers
from tests.kit.ports import free_port
from tests.kit.ranks import refusal_of, run_ranks, saved_by_ranks
from tests.kit.small_model import Small
from tests.worker.integrations.bits import assert_same_bits

NUM_RANKS = 2
OF_VALUES = ("te", "ao")
TRAINED = ("fp16-amp", "te", "O2", "O3")
pytestmark = pytest.mark.matrix
OPTIONS: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "save_strategy": "steps", "save_steps": 2}


def as_under_torchrun(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})


def train_with_transformers(rank: int, port: int, folder: str) -> None:
    from tests.worker.integrations.test_trainer import assert_is_plain, losses, trainer  # loads transformers

    as_under_torchrun(rank, port)
    found: dict[str, Any] = {}
    for level in TRAINED:
        options = OPTIONS | {"per_device_train_batch_size": 2}
        whole = trainer(Path(folder) / level, level, **options)
        whole.train()
        resumed = trainer(Path(folder) / f"{level}-again", level, seed=1 + rank, **options)
        # Accelerate calls a rank's CPU "cpu:0", a name that transformers gives to torch.load, which does not know it.
        vars(resumed.args)["_setup_devices"] = torch.device("cpu")
        resumed.train(resume_from_checkpoint=f"{folder}/{level}/checkpoint-2")
        states = [(each.model.state_dict(), each.optimizer.state_dict()) for each in (whole, resumed)]
        found[level] = {"losses": losses(whole), "states": states}
        if rank == 0:
            assert_is_plain(Path(folder) / level / "checkpoint-4", whole.model)
    for option, value in (("ddp_find_unused_parameters", False), ("fsdp", True)):
        found[option] = refusal_of(partial(trainer, Path(folder), "O2", **{option: value}))
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_transformers_trainer(tmp_path: Path) -> None:
    from tests.worker.integrations.test_trainer import CLOSE, losses, trainer

    run_ranks(train_with_transformers, (free_port(), str(tmp_path)), NUM_RANKS)
    found = saved_by_ranks(tmp_path, NUM_RANKS)
    alone = trainer(tmp_path / "alone", None, per_device_train_batch_size=4, **OPTIONS)
    alone.train()
    for level in TRAINED:
        (whole, resumed), (other, _) = (result[level]["states"] for result in found)
        assert_same_bits(whole, other)
        assert_same_bits(whole, resumed)
        close = CLOSE["fp16" if level == "fp16-amp" else "fp8"]
        assert found[0][level]["losses"] == pytest.approx(losses(alone), rel=close)
    assert "ddp_find_unused_parameters is 'False' at level O2; allowed: None" in found[0]["ddp_find_unused_parameters"]
    assert "fsdp is True at level O2; allowed: none" in found[0]["fsdp"]


def batch_of(step: int) -> Tensor:
    """One global batch."""
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(step))


def train_small(level: str, strategy: str, rank: int, num_ranks: int) -> dict[str, Tensor]:
    """The weights after eight steps on this rank's part of each batch."""
    torch.manual_seed(0)
    model: Any = Small()
    if strategy.startswith("fsdp2"):  # torch wants the optimizer made of the shards
        options: dict[str, Any] = {"torchao": {"fsdp_float8_all_gather": True}} if strategy == "fsdp2, fp8" else {}
        model, _ = initialize(model, None, level, convert_heads=True, **options)
        fully_shard(model.inner)
        fully_shard(model)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, convert_heads=True)
    if strategy == "ddp":
        model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
        assert isinstance(model, DistributedDataParallel)
    for step in range(8):
        part = batch_of(step).chunk(num_ranks)[rank]
        (model(part).float() - part[:, :16]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {name.removeprefix("module."): weight.detach() for name, weight in model.named_parameters()}
    return {name: weight.full_tensor() if isinstance(weight, DTensor) else weight for name, weight in whole.items()}


def train_by_torchs_wrappers(rank: int, port: int, folder: str) -> None:
    as_under_torchrun(rank, port)
    Accelerator(cpu=True)  # makes the process group
    found: dict[Any, Any] = {
        (level, strategy): train_small(level, strategy, rank, NUM_RANKS) for level in OF_VALUES for strategy in ("ddp", "fsdp2")
    }
    for strategy in ("fsdp2", "fsdp2, fp8"):
        with counted_gathers() as sent:
            found["ao", strategy] = train_small("ao", strategy, rank, NUM_RANKS)
        found["gathered", strategy] = sum(sent)
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("wrapped")
    run_ranks(train_by_torchs_wrappers, (free_port(), str(folder)), NUM_RANKS)
    return saved_by_ranks(folder, NUM_RANKS)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("level", OF_VALUES)
def test_two_ranks_train_what_one_process_trains(level: str, strategy: str, wrapped: list[dict[Any, Any]]) -> None:
    """At levels that hold values. Each rank has scales of its own: the errors are others than on one process, not larger."""
    exact, alone = (train_small(each, "alone", 0, 1) for each in ("fp32", level))
    first, second = (result[level, strategy] for result in wrapped)
    assert all(torch.equal(first[name], second[name]) for name in alone)
    distances = [sum(float((one[name] - exact[name]).square().sum()) ** 0.5 for name in alone) for one in (first, alone)]
    assert 0 < distances[0] < 1.5 * distances[1]


def test_torchaos_gather_in_fp8_changes_no_bit(wrapped: list[dict[Any, Any]]) -> None:
    """A rank sends half of each weight as codes, not in fp32: in eight steps those of the root once each, the inner twice."""
    weights = {name: weight.numel() for name, weight in Small().named_parameters() if weight.ndim == 2}
    saved = sum(3 * number * (16 if "inner" in name else 8) for name, number in weights.items()) // NUM_RANKS
    for result in wrapped:
        assert_same_bits(result["ao", "fsdp2, fp8"], result["ao", "fsdp2"])
        assert result["gathered", "fsdp2, fp8"] == result["gathered", "fsdp2"] - saved

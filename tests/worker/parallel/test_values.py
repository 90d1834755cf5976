"""Read a model that ranks divide: the result is the whole, at the precision that the ranks hold together."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from octet import export, initialize, parallelize
from octet.api_schemas.layout import Layout
from octet.worker import plain_state_dict
from octet.worker.common.config import RankEnv
from octet.worker.fp8.weight import Float8Weight
from octet.worker.mesh import Axes, Mesh
from tests.kit.ports import free_port
from tests.kit.pretrained_models import their_llama
from tests.kit.ranks import run_ranks
from tests.worker.parallel.reference import DeepNet, parallel_on, step_on_ranks
from tests.worker.parallel.tensor_runs import make
from tests.worker.parallel.tensor_runs import parallel_on as tensor_parallel_on

LEVELS = ("O2", "O3", "O3-split", "bf16-amp")


def read(mesh: Mesh, level: str, stage: int) -> dict[str, Any]:
    """Train a step at a stage; return what `plain_state_dict` and `state_dict` read then, and loaded again."""
    parallel = parallel_on(mesh.data, level, stage, DeepNet)
    start = {name: values.clone() for name, values in plain_state_dict(parallel.model).items()}
    step_on_ranks(parallel, 0)
    plain, state = plain_state_dict(parallel.model), parallel.model.state_dict()
    parallel.model.load_state_dict(state)
    return {"start": start, "plain": plain, "state": dict(state), "again": plain_state_dict(parallel.model)}


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    found: dict[Any, Any] = {}
    with Mesh(RankEnv(rank=rank, world_size=2, master_port=port), torch.device("cpu")) as mesh:
        for level in LEVELS:
            for stage in (0, 1, 2, 3):
                found[level, stage] = read(mesh, level, stage)
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("values")
    run_ranks(work, (free_port(), str(folder)), 2)
    return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(2)]


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, values in one.items():
        assert torch.equal(values, other[name]), name


@pytest.mark.parametrize("level", LEVELS)
def test_each_rank_reads_the_whole_at_each_stage(results: list[dict[Any, Any]], level: str) -> None:
    """At first to the bit. After a step a norm that was summed in another order may have moved a last bit."""
    for stage, like in ((1, 0), (2, 0), (3, 2)):
        for result in results:
            assert_equal(result[level, stage]["start"], results[0][level, like]["start"])
            for name, values in result[level, stage]["plain"].items():
                expected = results[0][level, like]["plain"][name]
                torch.testing.assert_close(values, expected, rtol=2e-3, atol=2e-2 if stage == 2 else 1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_state_dicts_hold_the_same_and_are_loaded(results: list[dict[Any, Any]], level: str, stage: int) -> None:
    for result in results:
        held = result[level, stage]
        for name, values in held["plain"].items():
            assert torch.equal(held["state"][name].to(values.dtype), values), name
        assert all(values.isfinite().all() for values in held["plain"].values())
        assert_equal(held["again"], held["plain"])


def exported(model: Any, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    """Export in fp32 on all ranks together; return what is in the file on the rank that writes it."""
    export(model, optimizer, folder, format="fp32")
    return load_file(folder / "model.safetensors") if dist.get_rank() == 0 else {}


def export_at_each_stage(rank: int, port: int, folder: str) -> None:
    """Export a Llama on one process, then divided; and after a step, where the file holds what the state dict has."""
    torch.set_num_threads(1)
    with Mesh(RankEnv(rank=rank, world_size=2, master_port=port), torch.device("cpu")):
        for level in ("te", *LEVELS):
            for stage in (0, 1, 2, 3):
                model = their_llama()
                model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
                own = Path(folder, f"{level}-{stage}")
                own.mkdir(exist_ok=True)
                alone = exported(model, optimizer, own / "alone")
                parallel = parallelize(model, optimizer, zero_stage=stage)
                assert_equal(exported(model, parallel.optimizer, own / "divided"), alone)
                ids = torch.arange(32).view(2, 16) + rank
                parallel.model(input_ids=ids, labels=ids).loss.backward()
                parallel.optimizer.step()
                stepped, state = exported(model, parallel.optimizer, own / "stepped"), plain_state_dict(model)
                assert_equal(stepped, {name: state[name] for name in stepped})
                assert not any(torch.equal(stepped[name], alone[name]) for name in stepped)


@pytest.mark.system
def test_ranks_export_what_one_process_exports(tmp_path: Path) -> None:
    run_ranks(export_at_each_stage, (free_port(), str(tmp_path)), 2)


def work_on_shards(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    env = RankEnv(rank=rank, world_size=2, master_port=port)
    layout = Layout(2, tensor=2)
    with Mesh(env, torch.device("cpu"), layout) as mesh:
        axes = Axes.of_layout(layout, rank, mesh.device)
        for level in LEVELS[:3]:
            parallel, (whole, optimizer) = tensor_parallel_on(axes, "llama", level, 0), make("llama", level)
            assert any(type(parameter) is Float8Weight for parameter in parallel.shards.cuts)
            assert_equal(plain_state_dict(parallel.model), plain_state_dict(whole))
            own = Path(folder, level)
            own.mkdir(exist_ok=True)
            divided = exported(parallel.model, parallel.optimizer, own / "divided")
            assert_equal(divided, exported(whole, optimizer, own / "alone"))


def test_shards_are_joined(tmp_path: Path) -> None:
    run_ranks(work_on_shards, (free_port(), str(tmp_path)), 2)

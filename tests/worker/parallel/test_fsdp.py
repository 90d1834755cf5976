"""Weights of codes under torch's FSDP2: the bits of ZeRO 3, codes on the wire and in memory, torch's checkpoints."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._pytree import keystr, tree_flatten_with_path

from octet import exact_state_dict, follow_optimizer, initialize, memory_report, plain_state_dict
from octet.api_schemas.levels import LEVELS
from octet.worker.common.config import RankEnv
from octet.worker.fp8.fallback import Fallback
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.weight import Float8Weight
from octet.worker.kernels.torch_private import local_of
from octet.worker.mesh import Mesh
from octet.worker.mesh.axes import Axes
from octet.worker.optim import LowBitAdamW
from octet.worker.parallel import Parallel
from tests.kit.gathers import counted_gathers
from tests.kit.ports import free_port
from tests.kit.ranks import refusal_of, run_ranks

pytestmark = pytest.mark.system

OF_CODES = ("O1", "O2", "O3", "O3-split")
NUM_STEPS, ROWS, HIDDEN, WIDTH = 3, 33, 160, 128
"""Blocks of 128 elements of a state do not cross the cuts by rows. No number of ranks here divides ROWS."""


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(2))
        self.last = nn.Linear(WIDTH, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def drawn(seed: int = 0, hidden: int = HIDDEN) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = Net(hidden)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter[0] *= 4  # one rank has a larger amax than the others
        return net


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "ours": torch.optim.AdamW,  # becomes ours
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def sharded(
    level: str, kind: str = "ours", seed: int = 0, hidden: int = HIDDEN, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = initialize(drawn(seed, hidden), None, level, convert_heads=True)[0]
    for part in (*model.blocks, model):
        fully_shard(part, **options)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=1e-2)
    if kind == "ours":
        follow_optimizer(model, optimizer)
        assert type(optimizer) is LowBitAdamW
    return model, optimizer


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))
    return model(x).square().mean()


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(loss_of(model, rank, step))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss.detach()) for loss in losses]


def train_by_zero3(level: str, mesh: Mesh, share: int) -> dict[str, Any]:
    """With gradients in fp32, as FSDP2 sums them."""
    net = drawn()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer = initialize(net, optimizer, level, convert_heads=True, gradient_accumulation="fp32")
    parallel = Parallel(model, optimizer, Axes.of_data(mesh.data), zero_stage=3)
    losses = []
    for step in range(NUM_STEPS):
        losses.append(loss_of(parallel.model, share, step))
        losses[-1].backward()
        parallel.synchronize()
        parallel.optimizer.step()
        parallel.publish()
    return {"losses": [float(loss.detach()) for loss in losses], "plain": plain_state_dict(model)}


def held_by(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor that this rank trains, as it is stored."""
    held: list[Tensor] = []
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        parts = [local]
        if type(local) is Float8Weight:
            parts = [local.codes.view(torch.uint8), local.dequant_scale, local.values_amax, local.dequantize()]
            parts += [] if local.residual is None else [local.residual]
        for state in optimizer.state.get(parameter, {}).values():
            states = state.values() if isinstance(state, dict) else [torch.as_tensor(state)]
            parts += [getattr(part, "_local_tensor", part) for part in states]
        held += [part.detach().clone() for part in parts]
    return held


def are_same(ones: list[Tensor], others: list[Tensor]) -> bool:
    assert len(ones) == len(others) > 0
    return all(torch.equal(one.float(), other.float()) for one, other in zip(ones, others, strict=True))


def trained(level: str, rank: int, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = sharded(level, **options)
    train(model, optimizer, rank, range(2))
    return model, optimizer


WHOLE = StateDictOptions(full_state_dict=True)


def save(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)


def loaded(folder: str, level: str, kind: str = "ours", hidden: int = HIDDEN) -> tuple[Any, torch.optim.Optimizer]:
    """Return another model, with what a checkpoint holds."""
    model, optimizer = sharded(level, kind, 1, hidden)
    states = get_state_dict(model, optimizer)
    read = {"model": states[0], "optimizer": states[1]}
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=read["optimizer"])
    return model, optimizer


def checkpointed(level: str, kind: str, rank: int, folder: str) -> dict[str, bool]:
    """Save, load into another model, and train on; and the same by whole state dicts."""
    model, optimizer = sharded(level, kind)
    train(model, optimizer, rank, range(2))
    saved = held_by(model, optimizer)
    save(model, optimizer, f"{folder}/{level}-{kind}")
    other, its_optimizer = loaded(f"{folder}/{level}-{kind}", level, kind)
    found = {"loaded": are_same(saved, held_by(other, its_optimizer))}
    for each in ((model, optimizer), (other, its_optimizer)):
        train(*each, rank, range(2, 4))
    found["continued"] = are_same(held_by(model, optimizer), held_by(other, its_optimizer))
    if kind == "ours":
        whole = get_state_dict(model, optimizer, options=WHOLE)
        third = sharded(level, kind, seed=2)
        set_state_dict(*third, model_state_dict=whole[0], optim_state_dict=whole[1], options=WHOLE)
        found["whole"] = are_same(held_by(model, optimizer), held_by(*third))
    return found


def refusals(rank: int) -> dict[str, str]:
    def by_columns() -> None:
        sharded("O2", shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))

    def in_bf16() -> None:
        loss_of(sharded("O2", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))[0], rank, 0)

    def with_optimizer() -> None:
        net = drawn()
        fully_shard(initialize(net, torch.optim.AdamW(net.parameters()), "O3")[0])

    def on_meta() -> None:
        model = initialize(drawn(), None, "O2")[0]
        fully_shard(model.to("meta"))

    def written_in_a_pass() -> None:
        model, _ = sharded("O2")
        model.blocks[0].unshard()
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(2)

    def demoted() -> None:
        model, _ = sharded("O3-split")
        loss_of(model, rank, 0)
        model.blocks[0].up.fallback = Fallback.DEMOTED
        loss_of(model, rank, 0)

    def exact_parts() -> None:
        exact_state_dict(sharded("O2")[0])

    calls = (by_columns, in_bf16, with_optimizer, on_meta, written_in_a_pass, demoted, exact_parts)
    return {call.__name__: refusal_of(call) for call in calls}


def writes(rank: int) -> dict[str, bool]:
    """Write DTensors by ops: values change, and one scale serves all ranks."""
    model, _ = sharded("O2")
    weight = model.last.weight
    before = plain_state_dict(model)["last.weight"]
    with torch.no_grad():
        weight.mul_(1 + 1e-5)
    scaled = plain_state_dict(model)["last.weight"]
    gathered = {}
    model.unshard()
    gathered["codes"] = model.last.weight.codes.float() * model.last.weight.dequant_scale
    model.reshard()
    with torch.no_grad():
        weight.zero_()
    offloaded = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    return {
        "small": torch.equal(scaled, before * (1 + 1e-5)),
        "gathered": torch.allclose(gathered["codes"], scaled, rtol=2**-10),
        "zero": bool((plain_state_dict(model)["last.weight"] == 0).all()),
        "offloaded": are_same(*(held_by(*trained("O3", rank, **options)) for options in ({}, offloaded))),
    }


def work(rank: int, num_ranks: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    found: dict[Any, Any] = {}
    share = rank if num_ranks == 2 else 0  # backends add two terms, or four that are equal, exactly; others in some order
    with Mesh(RankEnv(rank=rank, world_size=num_ranks, master_port=port), torch.device("cpu")) as mesh:
        for level in OF_CODES:
            model, optimizer = sharded(level)
            report = memory_report(model, optimizer)
            with counted_gathers() as sent:
                losses = train(model, optimizer, share, range(NUM_STEPS))
            found[level] = {"losses": losses, "plain": plain_state_dict(model), "sent": sent, "before": report}
            found[level] |= {"after": memory_report(model, optimizer), "zero3": train_by_zero3(level, mesh, share)}
            for kind in OPTIMIZERS if level == "O3" else ("ours",):
                found[level, kind] = checkpointed(level, kind, rank, folder)
        found["refused"], found["writes"] = refusals(rank), writes(rank)
    torch.save(found, f"{folder}/{rank}.pt")


def pass_on(rank: int, num_ranks: int, port: int, folder: str, *, loads: bool) -> None:
    """Save what ranks have trained, or load it; and write its whole state dicts."""
    torch.set_num_threads(1)
    with Mesh(RankEnv(rank=rank, world_size=num_ranks, master_port=port), torch.device("cpu")):
        for level in OF_CODES:
            saved = f"{folder}/passed-{level}"
            if loads:
                both = loaded(saved, level, hidden=2 * WIDTH)
            else:
                both = sharded(level, hidden=2 * WIDTH)
                train(*both, rank, range(2))
                save(*both, saved)
            whole = get_state_dict(*both, options=WHOLE)
            if rank == 0:
                torch.save(whole, f"{saved}-{num_ranks}.pt")


@pytest.mark.system
def test_torchs_checkpoints_are_loaded_by_another_number_of_ranks(tmp_path: Path) -> None:
    """Rows of whole blocks: each rank's states are cut elsewhere then, and are the same."""
    for num_ranks in (2, 3):
        run_ranks(partial(pass_on, loads=num_ranks == 3), (num_ranks, free_port(), str(tmp_path)), num_ranks)
    for level in OF_CODES:
        whole, expected = (
            tree_flatten_with_path(torch.load(tmp_path / f"passed-{level}-{num_ranks}.pt", weights_only=False))[0]
            for num_ranks in (3, 2)
        )
        assert [path for path, _ in whole] == [path for path, _ in expected]
        for (path, found), (_, wanted) in zip(whole, expected, strict=True):
            is_same = torch.equal(found, wanted) if isinstance(found, Tensor) else found == wanted
            assert is_same, (level, keystr(path))


def pass_on_rows(rank: int, num_ranks: int, port: int, folder: str, *, loads: bool) -> None:
    """Save what ranks have trained, or load it; and write the values of this rank's states."""
    torch.set_num_threads(1)
    with Mesh(RankEnv(rank=rank, world_size=num_ranks, master_port=port), torch.device("cpu")):
        for level in OF_CODES:
            saved = f"{folder}/rows-{level}"
            model, optimizer = loaded(saved, level) if loads else sharded(level)
            if not loads:
                train(model, optimizer, rank, range(2))
                save(model, optimizer, saved)
                whole = get_state_dict(model, optimizer, options=WHOLE)
                if rank == 0:
                    torch.save(whole, f"{saved}-whole.pt")
            torch.save(values_of_states(model, optimizer), f"{saved}-{num_ranks}-{rank}.pt")
            train(model, optimizer, rank, range(2, 3))


def values_of_states(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Return the values of this rank's weights and of its moments, 1-D."""
    found, (group,) = {}, optimizer.param_groups
    for name, parameter in model.named_parameters():
        local = local_of(parameter.detach())
        found[name] = (local.dequantize() if type(local) is Float8Weight else local).reshape(-1).clone()
        for state in optimizer.rule.state_codecs:
            held = optimizer.stored_state(parameter, group, state)
            found[f"{name} {state}"] = held.read(range(found[name].numel())).clone()
    return found


@pytest.mark.system
def test_blocks_that_cross_rows_are_encoded_again_by_another_number_of_ranks(tmp_path: Path) -> None:
    """A rank's blocks begin at its first element: values stay, but for a second rounding of moments in 8 bits.

    So it is for one process that loads the whole states.
    """
    for num_ranks in (2, 3):
        run_ranks(partial(pass_on_rows, loads=num_ranks == 3), (num_ranks, free_port(), str(tmp_path)), num_ranks)
    for level in OF_CODES:
        saved, by_ranks = ([tmp_path / f"rows-{level}-{of}-{rank}.pt" for rank in range(of)] for of in (2, 3))
        expected, elsewhere = (concatenated([torch.load(path) for path in paths]) for paths in (saved, by_ranks))
        whole = torch.load(tmp_path / f"rows-{level}-whole.pt", weights_only=False)
        alone = initialize(*with_adamw(drawn(1)), level, convert_heads=True)
        set_state_dict(*alone, model_state_dict=whole[0], optim_state_dict=whole[1])
        for found in (elsewhere, values_of_states(*alone)):
            rounded = {name for name, values in found.items() if not torch.equal(values, expected[name])}
            assert bool(rounded) == (level != "O1") or found is not elsewhere
            assert all("down.weight exp_avg" in name for name in rounded)
            for name in rounded:
                assert (found[name] - expected[name]).norm() <= 0.03 * expected[name].norm(), (level, name)


def with_adamw(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def concatenated(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0]}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.matrix)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("fsdp")
    run_ranks(work, (request.param, free_port(), str(folder)), request.param)
    return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(request.param)]


@pytest.mark.parametrize("level", OF_CODES)
def test_the_bits_are_those_of_zero_3(level: str, found: list[dict[Any, Any]]) -> None:
    for result in found:
        held, expected = result[level], result[level]["zero3"]
        assert held["losses"] == expected["losses"]
        assert list(held["plain"]) == list(expected["plain"])
        for name, values in expected["plain"].items():
            assert torch.equal(held["plain"][name], values), name


@pytest.mark.parametrize("level", OF_CODES)
def test_codes_are_what_is_sent_and_held(level: str, found: list[dict[Any, Any]]) -> None:
    """A gather of the root's layer in a step, two of each block's, a byte or two for an element; biases are fp32."""
    num_ranks, size = len(found), 1 if LEVELS[level].weight == "fp8" else 2
    of_block = (2 * WIDTH * HIDDEN * size + 4 * HIDDEN) // num_ranks
    of_root = -(-ROWS // num_ranks) * (WIDTH * size + 4)
    for rank, result in enumerate(found):
        assert sum(result[level]["sent"]) == NUM_STEPS * (4 * of_block + of_root)
        for time in ("before", "after"):
            assert result[level][time]["weights"] == 2 * of_block + of_root, (rank, time)
        refined = {"O3": 2, "O3-split": 1}.get(level, 0)
        rows = [min(-(-ROWS // num_ranks), max(0, ROWS - each * -(-ROWS // num_ranks))) for each in range(num_ranks)][rank]
        rows = -(-ROWS // num_ranks) if level == "O3-split" else rows
        assert result[level]["after"]["master_weights"] == refined * (4 * WIDTH * HIDDEN // num_ranks + rows * WIDTH)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", OF_CODES)
def test_torchs_checkpoints_return_exactly(level: str, kind: str, found: list[dict[Any, Any]]) -> None:
    for result in found:
        for name, is_same in result.get((level, kind), {}).items():
            assert is_same, name


def test_writes_arrive(found: list[dict[Any, Any]]) -> None:
    for result in found:
        assert all(result["writes"].values()), result["writes"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("by_columns", "allowed: one cut of the first dimension"),
        ("in_bf16", "allowed: a MixedPrecisionPolicy without param_dtype"),
        ("with_optimizer", "then fully_shard, then make the optimizer, then follow_optimizer"),
        ("on_meta", "Build the model on its device, or load it there before fully_shard"),
        ("written_in_a_pass", "allowed: writes into its shards"),
        ("demoted", "which FSDP2 did not gather at first"),
        ("exact_parts", "it brings back the same codes"),
    ],
)
def test_what_cannot_work_is_refused(name: str, said: str, found: list[dict[Any, Any]]) -> None:
    for result in found:
        assert said in result["refused"][name]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("level", OF_CODES)
def test_torchs_checkpoints_return_a_whole_model(level: str, tmp_path: Path) -> None:
    """In one process: values of weights, states and masters are exact, and so is how training goes on."""

    def made(seed: int) -> tuple[Any, Any]:
        net = drawn(seed)
        return initialize(net, torch.optim.AdamW(net.parameters(), lr=1e-2), level, convert_heads=True)

    model, optimizer = made(0)
    train(model, optimizer, 0, range(2))
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=tmp_path, no_dist=True)
    other, its_optimizer = made(1)
    states = get_state_dict(other, its_optimizer)
    read = {"model": states[0], "optimizer": states[1]}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, its_optimizer, model_state_dict=states[0], optim_state_dict=read["optimizer"])
    values = [layer.weight.dequantize() for layer in model.modules() if isinstance(layer, Float8Linear)]
    assert are_same(values, [layer.weight.dequantize() for layer in other.modules() if isinstance(layer, Float8Linear)])
    masters = [[state["master_weights"]["codes"] for state in each.state.values() if "master_weights" in state]
               for each in (optimizer, its_optimizer)]  # fmt: skip
    assert not masters[0] or are_same(*masters)

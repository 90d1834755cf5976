"""A collective of torch.distributed on a gradient held in FP8 does what it does on the gradient's values, or is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octet.worker import initialize
from octet.worker.fp8 import collectives
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks

SHAPE = (16, 32)
ONE_CODE = 2**-3
"""The distance of two E4M3 codes, relative to the smaller."""
Result = list[Tensor]
Collective = Callable[[Tensor], Result]
"""Runs a collective with a gradient, and returns everything that it has written: the gradient itself if it is written."""


def in_place(call: Callable[[Tensor], Any]) -> Collective:
    def run(gradient: Tensor) -> Result:
        call(gradient)
        return [gradient]

    return run


def handled(call: Callable[[Tensor], Any]) -> Collective:
    def run(gradient: Tensor) -> Result:
        call(gradient).wait()
        return [gradient]

    return run


def plain(*shape: int) -> Tensor:
    return torch.zeros(*(shape or SHAPE))


def of_rank(*others: float) -> Tensor:
    """A plain tensor, another one on each rank."""
    return torch.full(SHAPE, 1.5 * (1 + dist.get_rank()))


def all_gather(gradient: Tensor) -> Result:
    outputs = [plain(), plain()]
    dist.all_gather(outputs, gradient)
    return outputs


def all_gather_into_gradient(gradient: Tensor) -> Result:
    outputs = [gradient, plain()]
    dist.all_gather(outputs, of_rank())
    return outputs


def all_gather_into_tensor(gradient: Tensor) -> Result:
    output = plain(32, 32)
    dist.all_gather_into_tensor(output, gradient)
    return [output]


def all_gather_of_halves(gradient: Tensor) -> Result:
    dist.all_gather_into_tensor(gradient, of_rank()[:8].contiguous())
    return [gradient]


def all_gather_coalesced(gradient: Tensor) -> Result:
    outputs = [[plain(), plain()], [plain(), plain()]]
    dist.all_gather_coalesced(outputs, [gradient, of_rank()])
    return [*outputs[0], *outputs[1]]


def reduce_scatter(gradient: Tensor) -> Result:
    dist.reduce_scatter(gradient, [of_rank(), 2 * of_rank()])
    return [gradient]


def reduce_scatter_tensor(gradient: Tensor) -> Result:
    output = plain(8, 32)
    dist.reduce_scatter_tensor(output, gradient)
    return [output]


def all_to_all(gradient: Tensor) -> Result:
    outputs = [plain(8, 32), plain(8, 32)]
    dist.all_to_all(outputs, list(gradient.chunk(2)))
    return outputs


def all_to_all_single(gradient: Tensor) -> Result:
    dist.all_to_all_single(gradient, of_rank() * torch.arange(16).unsqueeze(1))
    return [gradient]


def gather(gradient: Tensor) -> Result:
    outputs = [plain(), plain()]
    dist.gather(gradient, outputs if dist.get_rank() == 0 else None, dst=0)
    return outputs


def scatter(gradient: Tensor) -> Result:
    dist.scatter(gradient, [of_rank(), 3 * of_rank()] if dist.get_rank() == 0 else None, src=0)
    return [gradient]


def sent(gradient: Tensor) -> Result:
    output = plain()
    if dist.get_rank() == 0:
        dist.send(gradient, 1)
    else:
        dist.recv(output, 0)
    return [output]


def sent_in_a_batch(gradient: Tensor) -> Result:
    output, other = plain(), 1 - dist.get_rank()
    operations = [dist.P2POp(dist.isend, gradient, other), dist.P2POp(dist.irecv, output, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [output]


def coalesced(gradient: Tensor) -> Result:
    other = of_rank()
    dist.all_reduce_coalesced([gradient, other])
    return [gradient, other]


def coalesced_by_the_manager(gradient: Tensor) -> Result:
    other = of_rank()
    with dist._coalescing_manager():
        dist.all_reduce(gradient)
        dist.all_reduce(other)
    return [gradient, other]


def all_gather_by_the_manager(gradient: Tensor) -> Result:
    outputs = [plain(32, 32), plain(32, 32)]
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(outputs[0], gradient)
        dist.all_gather_into_tensor(outputs[1], of_rank())
    return outputs


def reduce_scatter_by_the_manager(gradient: Tensor) -> Result:
    output = plain(8, 32)
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(gradient, torch.cat([of_rank(), 2 * of_rank()]))
        dist.reduce_scatter_tensor(output, of_rank())
    return [gradient, output]


def functional_in_place(gradient: Tensor) -> Result:
    group = dist.group.WORLD
    assert group is not None
    torch.ops._c10d_functional.all_reduce_(gradient, "sum", group.group_name)
    return [gradient]


def functional_broadcast(gradient: Tensor) -> Result:
    group = dist.group.WORLD
    assert group is not None
    return [torch.ops._c10d_functional.broadcast_(gradient, 1, group.group_name)]


def functional_into_out(gradient: Tensor) -> Result:
    group = dist.group.WORLD
    assert group is not None
    torch.ops._c10d_functional.all_gather_into_tensor_out(of_rank()[:8].contiguous(), 2, group.group_name, out=gradient)
    return [gradient]


def functional_coalesced_in_place(gradient: Tensor) -> Result:
    group, other = dist.group.WORLD, of_rank()
    assert group is not None
    for tensor in torch.ops._c10d_functional.all_reduce_coalesced_([gradient, other], "sum", group.group_name):
        torch.ops._c10d_functional.wait_tensor(tensor)
    return [gradient, other]


def in_backward(gradient: Tensor) -> Result:
    """torch.distributed.nn's, which autograd goes through."""
    from torch.distributed.nn.functional import all_reduce

    return [all_reduce(gradient)]


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": in_place(dist.all_reduce),
    "all_reduce, mean by hand": in_place(lambda gradient: (dist.all_reduce(gradient), gradient.div_(2))),
    "all_reduce, maximum": in_place(partial(dist.all_reduce, op=dist.ReduceOp.MAX)),
    "all_reduce, asynchronous": handled(partial(dist.all_reduce, async_op=True)),
    "all_reduce of a view": in_place(lambda gradient: dist.all_reduce(gradient.view(-1))),
    "all_reduce of a part": in_place(lambda gradient: dist.all_reduce(gradient[2:5])),
    "all_reduce of data": in_place(lambda gradient: dist.all_reduce(gradient.data)),
    "all_reduce_coalesced": coalesced,
    "the coalescing manager": coalesced_by_the_manager,
    "the coalescing manager, all_gather": all_gather_by_the_manager,
    "the coalescing manager, reduce_scatter": reduce_scatter_by_the_manager,
    "broadcast": in_place(partial(dist.broadcast, src=1)),
    "reduce": in_place(partial(dist.reduce, dst=0)),
    "all_gather": all_gather,
    "all_gather into the gradient": all_gather_into_gradient,
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_gather_into_tensor of halves": all_gather_of_halves,
    "all_gather_coalesced": all_gather_coalesced,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "gather": gather,
    "scatter": scatter,
    "send": sent,
    "batch_isend_irecv": sent_in_a_batch,
    "functional all_reduce": lambda gradient: [functional.all_reduce(gradient, "sum", dist.group.WORLD) + 0],
    "functional all_gather": lambda gradient: [functional.all_gather_tensor(gradient, 0, dist.group.WORLD) + 0],
    "functional broadcast": lambda gradient: [functional.broadcast(gradient, 1, dist.group.WORLD) + 0],
    "functional all_gather, coalesced": lambda gradient: [
        gathered + 0 for gathered in functional.all_gather_into_tensor_coalesced([gradient, of_rank()], dist.group.WORLD)
    ],
    "functional all_to_all": lambda gradient: [functional.all_to_all_single(gradient, None, None, dist.group.WORLD) + 0],
    "functional all_gather into out": functional_into_out,
    "functional broadcast_": functional_broadcast,
    "functional reduce_scatter": lambda gradient: [
        functional.reduce_scatter_tensor(gradient, "sum", 0, dist.group.WORLD) + 0  # type: ignore[arg-type]
    ],
    "functional all_reduce_": functional_in_place,
    "functional all_reduce_coalesced_": functional_coalesced_in_place,
    "torch.distributed.nn": in_backward,
}
ALIKE = ("all_reduce", "all_reduce, asynchronous", "all_reduce_coalesced", "broadcast", "functional all_reduce_")
"""Some after which both ranks have the same values."""
UNSEEN = {"barrier", "monitored_barrier_", "check_for_nan"}
"""Ops of c10d that take no tensor of a caller, or return nothing; the second is run under a flag of torch's alone."""
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "recv": partial(dist.recv, src=0),
    "recv from anybody": dist.recv,
    "irecv": partial(dist.irecv, src=0),
}


class Recorded(TorchDispatchMode):
    """Records the names of the collectives that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if collectives.is_collective(func):
            self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def gradient_of(rank: int) -> Float8Gradient:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))
    return Float8Gradient.quantize(values, RoundingPosition(0, 0, share=rank, num_shares=2)).mul_(1 + 0.3 * rank)


def of_a_model() -> Tensor:
    """A gradient as a backward pass leaves it at level O2, that `all_reduce` sums by hand. Ranks have other batches."""
    torch.manual_seed(0)
    model, _ = initialize(nn.Sequential(nn.Linear(128, 64)), opt_level="O2")
    torch.manual_seed(dist.get_rank())
    model(torch.randn(32, 128)).square().mean().backward()
    gradient = model[0].weight.grad  # type: ignore[union-attr]
    assert isinstance(gradient, Float8Gradient)
    return gradient


def run(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    seen: set[str] = set()
    for name, collective in COLLECTIVES.items():
        gradient = gradient_of(rank)
        expected = collective(gradient.dequantize())
        with Recorded() as recorded:
            results = collective(gradient)
        seen |= recorded.names
        codes = [each.codes.view(torch.uint8) for each in results if isinstance(each, Float8Gradient)]
        found[name] = {
            "expected": expected,
            "found": [each.dequantize() if isinstance(each, Float8Gradient) else each for each in results],
            "codes": codes,
            "kept": gradient.dequantize(),
            "is_rounded": bool(codes),
        }
    for name, refused in REFUSED.items():
        with pytest.raises(NotImplementedError, match=r"allowed: .*tensor\.copy_\(received\)"), Recorded() as recorded:
            refused(gradient_of(rank))
        seen |= recorded.names
        found[name] = True
    found["seen"] = seen
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        gradient_of(rank).data_ptr()
    gradient = of_a_model()
    found["model"] = {"before": gradient.dequantize()}
    dist.all_reduce(gradient)
    found["model"]["after"] = gradient.dequantize()
    broken = gradient_of(rank)
    broken[0, rank] = torch.inf
    dist.all_reduce(broken)
    found["overflow"] = bool(broken.dequant_scale.isnan())
    torch.save(found, f"{folder}/{rank}.pt")
    # torch dispatches no op whose lists of lists alone hold a subclass. Nothing is sent: rank 1 fails because rank 0 leaves.
    with pytest.raises(RuntimeError, match="Cannot access data pointer" if rank == 0 else ""):
        dist.scatter(plain(), [gradient_of(0), gradient_of(1)] if rank == 0 else None, src=0)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run, (free_port(), str(folder)), 2)
    return saved_by_ranks(folder, 2)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_that_of_the_values(ranks: list[dict[str, Any]], name: str) -> None:
    for rank, of_rank in enumerate(ranks):
        found = of_rank[name]
        for result, expected in zip(found["found"], found["expected"], strict=True):
            smallest = expected.abs().max().item() * 2**-15
            torch.testing.assert_close(result, expected, rtol=ONE_CODE if found["is_rounded"] else 0, atol=smallest)
        if not found["codes"]:  # what is only read keeps its codes
            assert torch.equal(found["kept"], gradient_of(rank).dequantize())


def test_a_sum_is_not_what_a_rank_had(ranks: list[dict[str, Any]]) -> None:
    for rank in range(2):
        [found] = ranks[rank]["all_reduce"]["found"]
        assert not torch.allclose(found, gradient_of(rank).dequantize(), rtol=0.5)


@pytest.mark.parametrize("name", ALIKE)
def test_ranks_with_the_same_values_hold_the_same_codes(ranks: list[dict[str, Any]], name: str) -> None:
    ours, theirs = (of_rank[name]["codes"][0] for of_rank in ranks)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", REFUSED)
def test_a_receive_is_refused(ranks: list[dict[str, Any]], name: str) -> None:
    assert all(of_rank[name] for of_rank in ranks)


def test_a_models_gradients_are_summed_by_hand(ranks: list[dict[str, Any]]) -> None:
    expected = ranks[0]["model"]["before"] + ranks[1]["model"]["before"]
    for of_rank in ranks:
        torch.testing.assert_close(
            of_rank["model"]["after"], expected, rtol=ONE_CODE, atol=expected.abs().max().item() * 2**-15
        )


def test_an_overflow_on_one_rank_marks_the_sum(ranks: list[dict[str, Any]]) -> None:
    assert all(of_rank["overflow"] for of_rank in ranks)


def test_each_op_of_c10d_is_known(ranks: list[dict[str, Any]]) -> None:
    """An op that a version of torch adds is refused until its writes are stated here, and a case above runs it."""
    ops = torch._C._dispatch_get_all_op_names()
    names = {name.split(".")[0] for name in ops if name.startswith("c10d::")}
    assert {name.split("::")[1] for name in names} <= collectives.KNOWN
    assert names - ranks[0]["seen"] == {f"c10d::{name}" for name in UNSEEN}


def test_functional_collectives_that_declare_a_write_are_known_to_write() -> None:
    ops = torch._C._dispatch_get_all_op_names()
    names = {name.split("::")[1].split(".")[0] for name in ops if name.startswith("_c10d_functional::")}
    known = names & (collectives.KNOWN - collectives.RECEIVES)
    assert {"all_reduce_", "broadcast", "all_gather_into_tensor_out"} <= known
    for name in known:
        op = getattr(torch.ops._c10d_functional, name).default
        arguments = {argument.name: argument.name for argument in op._schema.arguments}
        declared = [argument.name for argument in op._schema.arguments if argument.is_write]
        assert collectives.written_by(op, tuple(arguments), arguments) == declared, name


@pytest.mark.parametrize("op", ["c10d::shuffle_", "symm_mem::two_shot_all_reduce_", "_c10d_functional::shuffle"])
def test_an_unknown_collective_is_refused(op: str) -> None:
    class Unknown:
        namespace = op.split("::")[0]

        class _schema:
            name = op

    assert collectives.is_collective(Unknown())
    with pytest.raises(NotImplementedError, match=r"octet\.parallelize"):
        collectives.written_by(Unknown(), (), {})

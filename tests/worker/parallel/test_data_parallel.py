"""Gradients are exchanged over real ranks (gloo) while the backward pass computes, and each mean is right to the bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas import Layout
from octet.worker import initialize, kernels
from octet.worker.checkpoint.resume import random_state, set_random_state
from octet.worker.common.config import RankEnv
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.mesh import Axis, Mesh
from octet.worker.parallel import GradientBuckets, broadcast_parameters
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks

AXES = {"data": 2, "world": 4}
"""Axes of one mesh of 4 ranks, with their sizes."""
NUM_BLOCKS = 3
Result = dict[str, Any]


class Net(nn.Module):
    """A tied head, uneven sizes, a layer that only even ranks use, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 48)
        self.never = nn.Linear(48, 48)
        self.sometimes = nn.Linear(48, 48)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(48, 37, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, is_even: bool, events: list[str]) -> Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = x + block(x).relu()
            x.register_hook(lambda _, index=index: events.append(f"backward of block {index}"))
        return self.head(x + self.sometimes(x) if is_even else x)


class RecordedAxis(Axis):
    """An axis that notes when an exchange starts."""

    events: list[str]

    def start_exchange(self, parts_RS: Tensor) -> Any:
        self.events.append("exchange")
        return super().start_exchange(parts_RS)


def make(level: str) -> Net:
    torch.manual_seed(3)
    model, _ = initialize(Net(), opt_level=level)
    assert isinstance(model, Net)
    return model


def values(model: nn.Module) -> dict[str, Any]:
    """Return each parameter's gradient: its codes and scale, or its values if it is not in FP8."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        is_in_codes = isinstance(gradient, Float8Gradient)
        found[name] = (gradient.codes.clone(), gradient.dequant_scale.clone()) if is_in_codes else gradient
    return found


def backward(model: Net, rank: int, micro_batch: int, events: list[str]) -> None:
    tokens = torch.randint(0, 37, (16,), generator=torch.Generator().manual_seed(10 * rank + micro_batch))
    nn.functional.cross_entropy(model(tokens, rank % 2 == 0, events), tokens.roll(1)).backward()


def exchanged(axis: Axis, level: str, max_elements: int, wide_dtype: torch.dtype = torch.float32) -> Result:
    """This rank's gradients over two micro-batches, their means, and the order of events. axis: of ranks that start at 0."""
    recorded = RecordedAxis(axis.name, axis.size, axis.rank, axis.device, axis.group)
    recorded.events = events = []
    local, model = make(level), make(level)
    buckets = GradientBuckets(model, recorded, max_elements=max_elements, wide_dtype=wide_dtype)
    unexchanged = GradientBuckets(local, recorded, max_elements=max_elements)
    with buckets.no_sync(), unexchanged.no_sync():
        for net in (local, model):
            backward(net, axis.rank, 0, events)
        backward(local, axis.rank, 1, events)
    own = values(local)
    before, _ = len(events), events.clear()
    backward(model, axis.rank, 1, events)
    buckets.finish()
    sent = {dtype: num for (collective, dtype), num in recorded.sent_bytes.items() if collective == "exchange"}
    return {"own": own, "mean": values(model), "events": list(events), "events_without_sync": before, "sent": sent}


def poisoned(axis: Axis) -> list[bool]:
    """Return for each mean if it is finite. The last rank's gradients, of two kinds, each hold a NaN."""
    model = make("O2")
    buckets = GradientBuckets(model, axis)
    for parameter in (model.blocks[0].weight, model.head.weight):
        gradient = torch.ones(parameter.shape)
        if axis.rank == axis.size - 1:
            gradient[0, 0] = torch.nan
        parameter.grad = gradient
    buckets.finish()
    means = [model.blocks[0].weight.grad, model.head.weight.grad]
    return [bool((mean + 0).isfinite().all()) for mean in means]


def drawn_again(axis: Axis) -> list[float]:
    """Return a rank's draws after its random state is saved, after it is restored, and after two ranks' states are restored."""
    torch.manual_seed(axis.rank)
    saved = random_state(axis)
    draws = [float(torch.rand(()))]
    for state in (saved, {name: part[:2] for name, part in saved.items()}):
        torch.manual_seed(99)
        set_random_state(state, axis)
        draws.append(float(torch.rand(())))
    return draws


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    with Mesh(RankEnv(rank=rank, world_size=4, master_port=port), torch.device("cpu"), Layout(4, tensor=2)) as mesh:
        found: Result = {}
        for axis in (mesh.data, mesh.world):
            for level in ("te", "O2"):
                found[axis.name, level] = exchanged(axis, level, max_elements=3000)
            found[axis.name, "bf16 sent"] = exchanged(axis, "te", max_elements=3000, wide_dtype=torch.bfloat16)
            found[axis.name, "one bucket"] = exchanged(axis, "O2", max_elements=1 << 20)
        found["poisoned"] = poisoned(mesh.world)
        torch.manual_seed(rank)
        layer = nn.Linear(5, 3)
        broadcast_parameters(layer, lambda _tensor: mesh.world)
        found["parameters"] = list(layer.parameters())
        found["late"] = late(mesh.world)
        found["drawn"] = drawn_again(mesh.world)
    torch.save(found, f"{folder}/{rank}.pt")


def late(axis: Axis) -> list[str]:
    """Return the errors for the gradient of a frozen parameter, and for a second gradient in one exchange."""
    messages = []
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    buckets = GradientBuckets(layer, axis)
    layer[1].weight.grad = torch.ones(4, 4)
    try:
        buckets.finish()
    except ValueError as error:
        messages.append(str(error))
    layer[1].weight.grad = None
    layer(torch.ones(1, 4)).sum().backward()
    try:
        layer(torch.ones(1, 4)).sum().backward()
    except RuntimeError as error:
        messages.append(str(error))
    buckets.finish()
    return messages


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(work, (free_port(), str(folder)), 4)
    return saved_by_ranks(folder, 4)


def of_axis(results: list[Result], axis: str) -> list[Result]:
    """The ranks of the axis through rank 0."""
    return results[::2] if axis == "data" else results


def mean_on_one_process(own: list[Any]) -> Any:
    """The mean of all ranks' gradients of one parameter, summed in their order; None counts as zeros."""
    present = [gradient for gradient in own if gradient is not None]
    if not present:
        return None
    if isinstance(present[0], Tensor):
        total = torch.zeros_like(present[0])
        for gradient in present:
            total += gradient
        return total / len(own)
    nothing = (torch.zeros_like(present[0][0]), torch.zeros(()))
    pairs = [nothing if gradient is None else gradient for gradient in own]
    codes_RS = torch.stack([codes.view(torch.uint8).view(-1) for codes, _ in pairs]).view(torch.float8_e4m3fn)
    mean_S, amax = kernels.mean_of_shards(codes_RS, torch.stack([dequant_scale for _, dequant_scale in pairs]))
    codes, dequant_scale = kernels.quantize(mean_S, torch.float8_e4m3fn, amax=amax)
    return codes.view(present[0][0].shape), dequant_scale


def same(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return left is right
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    return torch.equal(left[0].view(torch.uint8), right[0].view(torch.uint8)) and torch.equal(left[1], right[1])


@pytest.mark.parametrize("level", ["te", "O2"])
@pytest.mark.parametrize("axis", AXES)
def test_each_mean_is_that_of_one_process_on_every_rank(results: list[Result], axis: str, level: str) -> None:
    ranks = [result[axis, level] for result in of_axis(results, axis)]
    assert len(ranks) == AXES[axis]
    for name in ranks[0]["own"]:
        expected = mean_on_one_process([rank["own"][name] for rank in ranks])
        for rank in ranks:
            assert same(rank["mean"][name], expected), name


def test_gradients_sent_in_bf16_are_rounded_once_by_each_rank_and_once_as_a_mean(results: list[Result]) -> None:
    ranks = [result["world", "bf16 sent"] for result in results]
    for name in ranks[0]["own"]:
        rounded = [None if (own := rank["own"][name]) is None else own.bfloat16().float() for rank in ranks]
        mean = mean_on_one_process(rounded)
        for rank in ranks:
            assert same(rank["mean"][name], None if mean is None else mean.bfloat16().float()), name
    assert ranks[0]["sent"] == {"bfloat16": results[0]["world", "te"]["sent"]["float32"] // 2}


def test_a_gradient_that_only_some_ranks_have_is_shared_and_one_that_none_has_stays_none(results: list[Result]) -> None:
    # On axis "world" the odd ranks do not use the layer.
    assert [result["world", "O2"]["own"]["sometimes.weight"] is None for result in results] == [False, True] * 2
    assert all(result["world", "O2"]["mean"]["sometimes.weight"] is not None for result in results)
    assert all(result["world", "O2"]["mean"]["never.weight"] is None for result in results)


@pytest.mark.parametrize("axis", AXES)
def test_the_division_into_buckets_changes_no_bit(results: list[Result], axis: str) -> None:
    for result in results:
        for name, mean in result[axis, "O2"]["mean"].items():
            assert same(mean, result[axis, "one bucket"]["mean"][name]), name


@pytest.mark.parametrize("level", ["te", "O2"])
def test_buckets_are_exchanged_while_the_backward_pass_computes(results: list[Result], level: str) -> None:
    events = results[0]["data", level]["events"]
    assert events.index("exchange") < events.index("backward of block 0")
    assert events.count("exchange") >= 4
    assert "exchange" in events[events.index("backward of block 0") :]
    assert results[0]["data", level]["events_without_sync"] == 3 * NUM_BLOCKS  # three backward passes and no exchange


def test_a_nan_of_one_rank_is_seen_by_all(results: list[Result]) -> None:
    assert [result["poisoned"] for result in results] == [[False, False]] * 4


def test_all_ranks_start_from_the_first_ranks_parameters(results: list[Result]) -> None:
    for result in results[1:]:
        for first, other in zip(results[0]["parameters"], result["parameters"], strict=True):
            assert torch.equal(first, other)


def test_each_rank_goes_on_with_random_numbers_of_its_own(results: list[Result]) -> None:
    """If more ranks resume than have saved, the others draw numbers that no rank has drawn."""
    saved, again, with_more_ranks = zip(*(result["drawn"] for result in results), strict=True)
    assert saved == again
    assert with_more_ranks[:2] == saved[:2]
    assert len({*saved, *with_more_ranks}) == 6


def test_what_cannot_be_exchanged_is_refused_with_what_to_do(results: list[Result]) -> None:
    frozen, second = results[0]["late"]
    assert "'1.weight' has a gradient and was frozen" in frozen
    assert "Use no_sync" in second

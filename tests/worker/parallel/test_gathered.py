"""Level te under torch's FSDP2, with weights gathered as FP8 codes: the same bits as with weights gathered as values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from octet import follow_optimizer, initialize
from octet.worker.fp8.fallback import Fallback
from octet.worker.fp8.gathered import GatheredWeight, ShardedWeight
from octet.worker.fp8.linear import Float8Linear
from tests.golden.record import digest
from tests.kit.ports import free_port
from tests.kit.ranks import refusal_of, run_ranks, saved_by_ranks
from tests.kit.small_model import Small

NUM_STEPS = 4
CURRENT = {"scaling": "current", "format": "HYBRID", "margin": 1}
SHORT = {"scaling": "delayed", "amax_history_length": 2}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Uneven(nn.Module):
    """Layers whose rows no number of ranks divides, one of them used twice and recomputed, and one that is not converted."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 35)
        self.twice = nn.Linear(35, 35, bias=False)
        self.small = nn.Linear(35, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + checkpoint(self.twice, x, use_reentrant=False)
        return self.small(self.twice(x))


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    """A network whose first rows are larger than the others, so that shards have different amaxes."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[0] *= 4
    return model


def sharded(
    make: Callable[[], nn.Module], in_fp8: bool, recipe: Any = None, frozen: str | None = None, **options: Any
) -> nn.Module:
    """frozen: the name of a weight that is not trained. options: of `fully_shard`."""
    model, _ = initialize(drawn(make), None, "te", convert_heads=True, recipe=recipe, fsdp_float8_all_gather=in_fp8)
    if frozen is not None:
        model.get_parameter(frozen).requires_grad_(False)
    for part in model.children():
        if not isinstance(part, nn.LayerNorm):
            fully_shard(part, **options)
    fully_shard(model, **options)
    return model


def replicated() -> dict[str, Any]:
    """Options of shards on two ranks each, where there are four."""
    shape = (dist.get_world_size() // 2, 2)
    return {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))}


def train(rank: int, model: Any, accumulate: int = 1) -> dict[str, Any]:
    """Losses, the first gradients, and the state after some steps on this rank's part of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    follow_optimizer(model, optimizer)
    numbers = torch.Generator().manual_seed(rank)
    found: dict[str, Any] = {"losses": []}
    for _ in range(NUM_STEPS):
        for micro_batch in range(accumulate):
            model.set_requires_gradient_sync(micro_batch == accumulate - 1)
            loss = model(torch.randn(8, 32, generator=numbers)).float().square().mean()
            loss.backward()
            found["losses"].append(float(loss.detach()))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.setdefault("norms", []).append(float(norm.full_tensor()))
        found.setdefault(
            "gradients", digest([whole(parameter.grad) for parameter in model.parameters() if parameter.requires_grad])
        )
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found["evaluated"] = digest([model(torch.ones(8, 32))])
    found["windows"] = windows(model)
    found["weights"] = digest([whole(parameter.detach()) for parameter in model.parameters()])
    found["state"] = digest({name: whole(part) for name, part in model.state_dict().items()})
    return found


def windows(model: nn.Module) -> list[tuple[int, float]]:
    """Return for each window the number of steps it has seen, and its amax."""
    layers = [layer for layer in model.modules() if isinstance(layer, Float8Linear)]
    scalings = [scaling for layer in layers for scaling in layer.scalings().values() if scaling.recipe.amax_history_length]
    return [(int(scaling.num_finite_steps), float(scaling.window_amax)) for scaling in scalings]


def whole(tensor: Any) -> Any:
    return tensor.full_tensor().contiguous() if isinstance(tensor, DTensor) else tensor


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """Collect the bytes that this rank gives to each all-gather and each all-reduce."""
    sent: dict[str, list[int]] = {"gather": [], "reduce": []}
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # since torch 2.13
    gather, reduce = getattr(dist, name), dist.all_reduce

    def counting_gather(output: Tensor, input: Tensor, *arguments: Any, **options: Any) -> Any:
        sent["gather"].append(input.nbytes)
        return gather(output, input, *arguments, **options)

    def counting_reduce(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sent["reduce"].append(tensor.nbytes)
        return reduce(tensor, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, counting_gather)
        patch.setattr(dist, "all_reduce", counting_reduce)
        yield sent


def with_full_windows(model: nn.Module) -> None:
    """Let delayed scaling take its scales from windows that are full, and too narrow for some values."""
    for layer in model.modules():
        if isinstance(layer, Float8Linear):
            for scaling in layer.scalings().values():
                scaling.num_finite_steps.fill_(1024)
                scaling.window_amax.fill_(0.1)


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulated": {"recipe": CURRENT, "accumulate": 2},
    "uneven": {"make": Uneven},
    "bf16": {"options": lambda: {"mp_policy": BF16}},
    "replicated": {"options": replicated},
    "frozen, offloaded": {
        "options": lambda: {"frozen": "inner.0.weight", "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    },
    "full windows": {"change": with_full_windows},
    "short windows": {"recipe": SHORT},
}


def work(rank: int, num_ranks: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        for in_fp8 in (False, True):
            options = case["options"]() if "options" in case else {}
            model = sharded(case.get("make", Small), in_fp8, case.get("recipe"), **options)
            if "change" in case:
                case["change"](model)
            with counted() as sent:
                found[name, in_fp8] = train(rank, model, case.get("accumulate", 1))
            found[name, in_fp8, "sent"] = sent
    found["state dicts"] = state_dicts(folder, rank)
    found["refused"] = refusals()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def state_dicts(folder: str, rank: int) -> list[str]:
    """Whole values of a model: as one process holds them, gathered from shards, after a round trip, and as pickled shards."""
    alone: Any = drawn(Small)
    model = sharded(Small, True)
    options = StateDictOptions(full_state_dict=True)
    gathered = get_model_state_dict(model, options=options)
    other = sharded(Small, True)
    for parameter in other.parameters():
        parameter.detach().zero_()
    set_model_state_dict(other, dict(gathered), options=options)  # torch cuts what it is given
    again = get_model_state_dict(other, options=options)
    local = model.get_parameter("first.weight")
    torch.save(local.to_local(), f"{folder}/local-{rank}.pt")
    plain = torch.load(f"{folder}/local-{rank}.pt", weights_only=True)
    assert type(plain) is Tensor
    assert torch.equal(plain, alone.first.weight.chunk(dist.get_world_size())[rank])
    names = list(dict(alone.named_parameters()))
    return [digest([part[name] for name in names]) for part in (alone.state_dict(), gathered, again)]


def refusals() -> dict[str, str]:
    def cut_columns() -> None:
        model, _ = initialize(Small(), None, "te", fsdp_float8_all_gather=True)
        fully_shard(model, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
        model(torch.ones(8, 32))

    def demoted() -> None:
        model = sharded(Small, True)
        model.first.fallback = Fallback.DEMOTED
        model(torch.ones(8, 32))

    def read_values() -> None:
        model = sharded(Small, True)
        model.first.unshard()
        assert isinstance(model.first.weight, GatheredWeight)
        model.first.weight.float().sum()

    return {call.__name__: refusal_of(call) for call in (cut_columns, demoted, read_values)}


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.system), pytest.param(4, marks=pytest.mark.matrix)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("gathered")
    run_ranks(work, (request.param, free_port(), str(folder)), request.param)
    return saved_by_ranks(folder, request.param)


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_weights_gathered_as_values(case: str, found: list[dict[Any, Any]]) -> None:
    for result in found:
        assert result[case, True] == result[case, False]
        assert result[case, True]["weights"] == found[0][case, True]["weights"]
        assert len(set(result[case, True]["losses"])) == len(result[case, True]["losses"])
    assert found[0][case, True]["losses"] != found[1][case, True]["losses"]


@pytest.mark.parametrize(("case", "bytes_of_a_value"), [("default", 4), ("accumulated", 4), ("bf16", 2)])
def test_a_gather_sends_a_byte_of_each_weight(case: str, bytes_of_a_value: int, found: list[dict[Any, Any]]) -> None:
    """Every part is its own group here, gathered in the forward and the backward pass of each micro-batch."""
    num_gathers = 2 * NUM_STEPS * CASES[case].get("accumulate", 1) + 1  # and once in evaluation
    weights = [weight.numel() for weight in Small().parameters() if weight.ndim == 2]
    for result in found:
        wide, narrow = (result[case, in_fp8, "sent"] for in_fp8 in (False, True))
        saved = num_gathers * (bytes_of_a_value - 1) * sum(weights) // len(found)
        assert sum(wide["gather"]) - sum(narrow["gather"]) == saved
        assert narrow["reduce"].count(4) - wide["reduce"].count(4) == num_gathers * len(weights)


def test_windows_follow_an_optimizer_that_was_made_after_the_shards(found: list[dict[Any, Any]]) -> None:
    for result in found:
        for in_fp8 in (False, True):
            found_windows = result["short windows", in_fp8]["windows"]
            assert found_windows
            assert all(num_steps == NUM_STEPS and amax > 0 for num_steps, amax in found_windows)
        assert result["accumulated", True]["windows"] == []


def test_state_dicts_hold_values(found: list[dict[Any, Any]]) -> None:
    for result in found:
        assert len(set(result["state dicts"])) == 1


def test_what_codes_do_not_serve_is_refused(found: list[dict[Any, Any]]) -> None:
    for result in found:
        assert "allowed with fsdp_float8_all_gather: a cut of the first dimension" in result["refused"]["cut_columns"]
        assert "would multiply in bf16 with a weight that FSDP2 gathers as FP8 codes" in result["refused"]["demoted"]
        assert "would read the values of a weight that FSDP2 has gathered" in result["refused"]["read_values"]


def test_a_model_that_is_not_sharded_computes_as_te() -> None:
    torch.manual_seed(0)
    plain, other = Small(), Small()
    other.load_state_dict(plain.state_dict())
    plain, _ = initialize(plain, None, "te")
    other, _ = initialize(other, None, "te", fsdp_float8_all_gather=True)
    assert type(other.first.weight.data) is ShardedWeight
    x = torch.randn(8, 32)
    for model in (plain, other):
        model(x).square().mean().backward()
    assert torch.equal(plain(x), other(x))
    assert torch.equal(plain.first.weight.grad, other.first.weight.grad)


@pytest.mark.parametrize(
    ("level", "options", "said"),
    [
        ("O2", {}, "True with level O2; allowed: level te"),
        ("bf16-amp", {}, "True with level bf16-amp; allowed: level te"),
        ("ao", {}, "Give it as torchao={'fsdp_float8_all_gather': True}"),
        ("te", {"recipe": {"granularity": "row"}}, "recipe.granularity row; allowed: one scale for each weight"),
        ("te", {"recipe": {"high_precision_gemms": ("grad_input",)}}, "high_precision_gemms grad_input; allowed: all products"),
        ("te", {"recipe": {"fp8_in_evaluation": False}}, "fp8_in_evaluation false; allowed: all products"),
        ("te", {"statistics_every": 10}, "allowed: no samples"),
        ("te", {"optimizer_name": "adamw"}, "fsdp_float8_all_gather is True and there is an optimizer; allowed: none yet"),
    ],
)
def test_other_combinations_are_refused(level: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace("{", r"\{")):
        initialize(Small(), None, level, fsdp_float8_all_gather=True, **options)

"""Ranks that hold different experts train a mixture as one process does, bit for bit, and save what any layout reads."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas import Layout
from octet.api_schemas.precision import PrecisionSpec
from octet.worker import checkpoint, exact_state_dict, initialize, plain_state_dict
from octet.worker.common.config import RankEnv
from octet.worker.fp8.experts import ExpertLinears, unstack_experts
from octet.worker.fp8.operand import OperandScaling
from octet.worker.mesh import Mesh
from octet.worker.mesh.axes import make_axes
from octet.worker.parallel import Parallel
from octet.worker.parallel.expert import DividedExperts
from octet.worker.parallel.norm import squared_norm
from octet.worker.parallel.parallel import read_over_ranks
from octet.worker.parallel.strategies import divide
from octet.worker.parallel.tensor import TensorShards
from octet.worker.pretrained.write import check_form
from tests.kit.ports import free_port
from tests.kit.ranks import refusal_of, run_ranks, saved_by_ranks
from tests.worker.fp8.test_experts import NUM_EXPERTS, WIDTH, experts, routing
from tests.worker.parallel.reference import (
    MAX_ELEMENTS,
    MAX_NORM,
    MICRO_BATCHES,
    STEPS,
    Result,
    adamw,
    make,
    mean_of,
    set_share,
    step_on_ranks,
)
from tests.worker.parallel.test_experts import Mixture
from tests.worker.parallel.test_muon import muon

pytestmark = pytest.mark.system

Case = tuple[str, int, int, str]
"""A level, the stage of ZeRO, the ranks that divide the experts, and the optimizer."""
CASES: dict[int, list[Case]] = {
    2: [(level, stage, 2, "adamw") for level, stage in (("O2", 0), ("O2", 1), ("te", 1), ("O3-split", 0), ("O1", 0))],
    4: [("O2", 0, 2, "adamw"), ("O2", 1, 2, "muon"), ("O3", 1, 2, "adamw"), ("O2", 1, 4, "adamw")],
}
OPTIMIZERS = {"adamw": adamw, "muon": muon}
KINDS = ("even", "skewed", "an empty expert", "no tokens")
LAYER_LEVELS = ("O2", "te")
"""Tokens in codes, and as values, since the scales of te are of past steps."""


class Unstacked(Mixture):
    """With experts that are layers of their own before the optimizer is made: Muon's states of a stack are in few bits."""

    def __init__(self) -> None:
        super().__init__()
        unstack_experts(self, PrecisionSpec(level="O2"))


class _Scaled(torch.autograd.Function):
    """The identity; gradients are multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def joint_losses(models: list[Any], ranks: list[int], step: int, micro_batch: int) -> list[Tensor]:
    """Return the losses of ranks, each with a model of its own, but for the experts: the first model's see all tokens."""
    number = len(ranks)
    inputs = [
        torch.randn(24, 32, generator=torch.Generator().manual_seed(1000 * rank + 10 * step + micro_batch)) for rank in ranks
    ]
    hidden = [model.first(x) for model, x in zip(models, inputs, strict=True)]
    for index in range(len(models[0].blocks)):
        blocks = [model.blocks[index] for model in models]
        normed = [block.norm(x) for block, x in zip(blocks, hidden, strict=True)]
        routed = [block.mixture.gate(x) for block, x in zip(blocks, normed, strict=True)]
        tokens = _Scaled.apply(torch.cat(normed), number)
        experts = [torch.cat([of_rank[place] for of_rank in routed]) for place in (2, 1)]
        weights = _Scaled.apply(experts[1], number)
        output = _Scaled.apply(blocks[0].mixture.experts(tokens, experts[0], weights), 1 / number)
        hidden = [x + own for x, own in zip(hidden, output.split(24), strict=True)]
    outputs = [model.head(x) + model.shift for model, x in zip(models, hidden, strict=True)]
    return [((out - x[:, :16].tanh()) ** 2).mean() / MICRO_BATCHES for out, x in zip(outputs, inputs, strict=True)]


def experts_of(model: nn.Module) -> list[bool]:
    """Return True for each parameter that is an expert's."""
    own = {parameter for module in model.modules() if isinstance(module, ExpertLinears) for parameter in module.parameters()}
    return [parameter in own for parameter in model.parameters()]


def one_process(num_ranks: int, case: Case) -> Result:
    """The same steps in one process. Each group of ranks that holds all experts between them is computed together."""
    level, _, degree, name = case
    model, optimizer = make(level, 0, num_ranks, Unstacked, OPTIMIZERS[name])
    groups, are_experts = [list(range(first, first + degree)) for first in range(0, num_ranks, degree)], experts_of(model)
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    for step in range(STEPS):
        by_rank, by_group, all_copies = [], [], []
        for number, ranks in enumerate(groups):
            models = [deepcopy(model) for _ in ranks]
            for own, rank in zip(models, ranks, strict=True):
                set_share(own, rank, num_ranks)
            for module in models[0].modules():
                if isinstance(module, ExpertLinears):
                    set_share(module, number, len(groups))
            sums = [0.0] * len(ranks)
            for micro_batch in range(MICRO_BATCHES):
                found = joint_losses(models, ranks, step, micro_batch)
                torch.stack(found).sum().backward()
                sums = [total + float(loss.detach()) for total, loss in zip(sums, found, strict=True)]
            for rank, total in zip(ranks, sums, strict=True):
                losses[rank].append(total)
            by_rank += [[parameter.grad for parameter in own.parameters()] for own in models]
            by_group.append(by_rank[-len(ranks)])
            all_copies.append(models)
        follow(model, all_copies)
        for index, (parameter, is_expert) in enumerate(zip(model.parameters(), are_experts, strict=True)):
            gradients = [own[index] for own in (by_group if is_expert else by_rank)]
            parameter.grad = gradients[0] if len(gradients) == 1 else mean_of([gradients])
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = sum(squared_norm(gradient) for gradient in gradients).sqrt().float()
        for gradient in gradients:
            gradient.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "model": exact_state_dict(model), "optimizer": optimizer.state_dict()}


def follow(model: nn.Module, copies: list[list[nn.Module]]) -> None:
    """Go on with the numbers of roundings, and the largest amaxes, of a model's copies, by group of ranks."""
    all_modules = [[list(copied.modules()) for copied in group] for group in copies]
    experts = {part for module in model.modules() if isinstance(module, ExpertLinears) for part in module.modules()}
    for index, own in enumerate(model.modules()):
        used = [group[0][index] for group in all_modules]
        if own not in experts:
            used = [copied[index] for group in all_modules for copied in group]
        position = getattr(own, "gradient_position", None)
        if position is not None:
            position.count = used[0].gradient_position.count
        if isinstance(own, OperandScaling) and own.has_window:
            own.step_amax.copy_(torch.stack([copied.step_amax for copied in used]).amax(0))


def trained(mesh: Mesh, case: Case, folder: Path) -> dict[str, Any]:
    level, stage, _, name = case
    model, optimizer = make(level, mesh.data.rank, mesh.data.size, Unstacked, OPTIMIZERS[name])
    parts = divide(model, optimizer, mesh)
    parallel = Parallel(model, optimizer, mesh, zero_stage=stage, max_elements=MAX_ELEMENTS, parts=parts)
    losses = []
    for step in range(STEPS):
        losses.append(step_on_ranks(parallel, step))
        parallel.optimizer.zero_grad()
    held, states = parallel.state_dicts()
    saved = checkpoint.save(folder / "-".join(map(str, case)), 1, {"model": held, "optimizer": states}, mesh.world)
    own = [len(module.held) for module in model.modules() if isinstance(module, ExpertLinears)]
    return {"losses": losses, "saved": saved, "experts": own, "sent": dict(mesh.expert.sent_bytes)}


def on_rank(mesh: Mesh, kind: str, level: str) -> dict[str, Any]:
    """One pass of a rank's tokens through a mixture, with the rows that it has sent."""
    model, _ = initialize(experts(), None, level, statistics_every=0)
    (part,) = divide(model, torch.optim.SGD(model.parameters()), mesh)
    assert isinstance(part, DividedExperts)
    own = "no tokens" if kind == "no tokens" and mesh.data.rank else "even" if kind == "no tokens" else kind
    tokens, index, weights = (*routing(own, mesh.data.rank),)
    tokens.requires_grad_()
    weights.requires_grad_()
    mesh.expert.sent_bytes.clear()
    output = model(tokens, index, weights)
    sent = dict(mesh.expert.sent_bytes)
    (output * torch.linspace(-1, 1, WIDTH)).sum().backward()
    gradients = {
        f"{name}.{expert}": layer.weight.grad + 0
        for name in ("gate_up_proj", "down_proj")
        for expert, layer in getattr(model, name).held.items()
    }
    refusal = refusal_of(partial(check_form, model, "fp8"))
    return {
        "refusal": refusal,
        "of tokens": (output.detach(), tokens.grad, weights.grad),
        "sent": sent,
        "all sent": dict(mesh.expert.sent_bytes),
        "gradients": gradients,
        "plain": plain_of(model, part),
    }


def plain_of(model: nn.Module, part: DividedExperts) -> dict[str, Tensor]:
    read_over_ranks(model, None, TensorShards(part.axes), part)
    return plain_state_dict(model)


def passes(mesh: Mesh) -> list[float]:
    """Evaluate a batch more on each rank than on the one before it."""
    model, optimizer = make("O2", mesh.data.rank, mesh.data.size, Mixture)
    parallel = Parallel(model, optimizer, mesh, parts=divide(model, optimizer, mesh))
    batches = [torch.randn(24, 32, generator=torch.Generator().manual_seed(number)) for number in range(mesh.data.rank + 1)]
    model.eval()
    with torch.no_grad():
        return [float(model(batch).sum()) for batch in parallel.as_many_passes(batches)]


def refused(mesh: Mesh) -> list[str]:
    """Return what is said of models whose experts cannot be divided."""
    found = []
    for build, level in ((lambda: nn.Sequential(nn.Linear(32, 32)), "O2"), (experts, "bf16-amp"), (of_three, "O2")):
        model, _ = initialize(build(), None, level)
        found.append(refusal_of(partial(divide, model, torch.optim.SGD(model.parameters()), mesh)))
    return found


def of_three() -> nn.Module:
    found = experts()
    found.num_experts = 3  # type: ignore[assignment]
    for name in ("gate_up_proj", "down_proj"):
        setattr(found, name, nn.Parameter(getattr(found, name)[:3].detach().clone()))
    return found


def work(rank: int, port: int, num_ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    found = {}
    env = RankEnv(rank=rank, world_size=num_ranks, master_port=port)
    with Mesh(env, torch.device("cpu")) as whole:
        meshes = {}
        for degree in sorted({case[2] for case in CASES[num_ranks]}):
            meshes[degree] = Mesh(env, torch.device("cpu"), Layout(num_ranks, expert=degree))
            meshes[degree].set_axes(meshes[degree].layout, make_axes(meshes[degree].layout, rank, whole.device))
        for case in CASES[num_ranks]:
            found[case] = trained(meshes[case[2]], case, Path(folder))
    torch.save(found, f"{folder}/{rank}.pt")


def work_on_layers(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    env = RankEnv(rank=rank, world_size=2, master_port=port)
    with Mesh(env, torch.device("cpu"), Layout(2, expert=2)) as mesh:
        found = {
            "layer": {(kind, level): on_rank(mesh, kind, level) for kind in KINDS for level in LAYER_LEVELS},
            "passes": passes(mesh),
            "refused": refused(mesh),
        }
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module", params=CASES, ids=lambda number: f"{number} ranks")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("experts")
    run_ranks(work, (free_port(), request.param, str(folder)), request.param)
    return folder, saved_by_ranks(folder, request.param)


def test_ranks_with_different_experts_train_as_one_process(ranks: tuple[Path, list[Any]]) -> None:
    torch.set_num_threads(1)
    folder, found = ranks
    for case in CASES[len(found)]:
        expected = one_process(len(found), case)
        assert [rank[case]["losses"] for rank in found] == expected["losses"], case
        saved = found[0][case]["saved"]
        loaded = checkpoint.load_folder(folder / "-".join(map(str, case)) / saved.name)
        for kind in ("model", "optimizer"):
            check_equal(loaded[kind], expected[kind], f"{case} {kind}")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the findings of two ranks, by rank, about single passes and refusals."""
    folder = tmp_path_factory.mktemp("layer")
    run_ranks(work_on_layers, (free_port(), str(folder)), 2)
    return saved_by_ranks(folder, 2)


@pytest.mark.parametrize("level", LAYER_LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_has_the_bits_of_one_process(two: list[Any], kind: str, level: str) -> None:
    """With tokens that all go to one expert, with an expert without tokens, and with a rank without tokens."""
    torch.set_num_threads(1)
    found = [rank["layer"][kind, level] for rank in two]
    kinds = ("even", "no tokens") if kind == "no tokens" else (kind, kind)
    inputs = [routing(own, rank) for rank, own in enumerate(kinds)]
    model, _ = initialize(experts(), None, level, statistics_every=0)
    tokens, index, weights = map(torch.cat, zip(*inputs, strict=True))
    tokens.requires_grad_()
    weights.requires_grad_()
    output = model(tokens, index, weights)
    (output * torch.linspace(-1, 1, WIDTH)).sum().backward()
    sizes = [len(own[0]) for own in inputs]
    for rank, expected in enumerate(zip(*(part.split(sizes) for part in (output, tokens.grad, weights.grad)), strict=True)):
        for one, other in zip(found[rank]["of tokens"], expected, strict=True):
            assert torch.equal(one, other), rank
    gradients = found[0]["gradients"] | found[1]["gradients"]
    for name, gradient in gradients.items():
        stack, _, expert = name.partition(".")
        assert torch.equal(2 * gradient, getattr(model, stack)[int(expert)].weight.grad + 0), name  # the mean over the ranks
    expected_plain = plain_state_dict(model)
    for rank in found:
        assert rank["plain"].keys() == expected_plain.keys()
        assert all(torch.equal(rank["plain"][name], value) for name, value in expected_plain.items())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_go_once_to_their_experts_and_back(two: list[Any], kind: str) -> None:
    """At O2 with a byte a feature, and as values where a layer takes none: the bytes are those of the rows that leave."""
    inputs = [routing(own, rank) for rank, own in enumerate(("even", "no tokens") if kind == "no tokens" else (kind, kind))]
    for rank in range(2):
        is_of_rank = [((own[1] // (NUM_EXPERTS // 2)) == rank) for own in inputs]
        num_left = int((~is_of_rank[rank]).sum())
        num_came = int(is_of_rank[1 - rank].sum())
        in_codes = two[rank]["layer"][kind, "O2"]
        assert in_codes["sent"].get(("exchange", "float8_e4m3fn"), 0) == num_left * WIDTH
        assert in_codes["sent"].get(("exchange", "float32"), 0) == 4 * num_came * WIDTH
        assert in_codes["all sent"].get(("exchange", "float8_e5m2"), 0) == num_left * WIDTH
        assert in_codes["all sent"].get(("exchange", "float32"), 0) == 2 * 4 * num_came * WIDTH
        assert two[rank]["layer"][kind, "te"]["sent"].get(("exchange", "float32"), 0) == 4 * (num_left + num_came) * WIDTH


def test_ranks_with_fewer_batches_take_part_in_an_evaluation(two: list[Any]) -> None:
    assert [len(rank["passes"]) for rank in two] == [1, 2]
    model, _ = make("O2", 0, 1, Mixture)
    model.eval()
    last = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert two[1]["passes"][1] == float(model(last).sum())


def test_what_cannot_be_divided_is_refused(two: list[Any]) -> None:
    for found in two:
        assert "ranks hold different experts of the model" in found["layer"]["even", "O2"]["refusal"]
        plain, stacked, of_three = found["refused"]
        assert "Sequential has no experts that are layers of their own" in plain
        assert "at a level that multiplies in FP8" in stacked
        assert "has 3 experts; allowed with an expert degree of 2: multiples of 2" in of_three


def check_equal(found: Any, expected: Any, path: str) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(torch.as_tensor(found).float(), expected.float()), path
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            check_equal(found[key], value, f"{path} {key}")
    elif isinstance(expected, list | tuple):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_equal(one, other, f"{path} {index}")
    else:
        assert found == expected, path

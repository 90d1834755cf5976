"""Ranks that hold different experts train a mixture as one process does, bit for bit, and save what any layout reads."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas import Layout
from octet.worker import checkpoint, exact_state_dict
from octet.worker.common.config import RankEnv
from octet.worker.fp8.experts import ExpertLinears
from octet.worker.mesh import Mesh
from octet.worker.parallel import Parallel
from octet.worker.parallel.norm import squared_norm
from octet.worker.parallel.strategies import divide
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks
from tests.worker.parallel.reference import (
    MAX_ELEMENTS,
    MAX_NORM,
    MICRO_BATCHES,
    STEPS,
    Result,
    make,
    mean_of,
    set_share,
    step_on_ranks,
)
from tests.worker.parallel.test_experts import Mixture

pytestmark = pytest.mark.system

Case = tuple[str, int, int]
"""A level, the stage of ZeRO, and the ranks that divide the experts."""
CASES: dict[int, list[Case]] = {
    2: [("O2", 0, 2), ("O2", 1, 2), ("te", 1, 2), ("O3-split", 0, 2), ("O1", 0, 2)],
    4: [("O2", 0, 2), ("O2", 1, 2), ("O3", 1, 2), ("O2", 1, 4)],
}
ALL_CASES = [(num_ranks, case) for num_ranks, cases in CASES.items() for case in cases]


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
    level, stage, degree = case
    model, optimizer = make(level, 0, num_ranks, Mixture)
    groups, are_experts = [list(range(first, first + degree)) for first in range(0, num_ranks, degree)], experts_of(model)
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    for step in range(STEPS):
        by_rank, by_group = [], []
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
        take_counts(models[0], model)
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


def take_counts(source: nn.Module, target: nn.Module) -> None:
    """Go on with the numbers of gradient roundings that a copy has made."""
    for own, copied in zip(target.modules(), source.modules(), strict=True):
        position = getattr(own, "gradient_position", None)
        if position is not None:
            position.count = copied.gradient_position.count


def trained(mesh: Mesh, case: Case, folder: Path) -> dict[str, Any]:
    level, stage, degree = case
    model, optimizer = make(level, mesh.data.rank, mesh.data.size, Mixture)
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


def work(rank: int, port: int, num_ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    found = {}
    env = RankEnv(rank=rank, world_size=num_ranks, master_port=port)
    with Mesh(env, torch.device("cpu")) as whole:
        meshes = {}
        for degree in sorted({case[2] for case in CASES[num_ranks]}):
            meshes[degree] = Mesh(env, torch.device("cpu"), Layout(num_ranks, expert=degree))
            from octet.worker.mesh.axes import make_axes

            meshes[degree].set_axes(meshes[degree].layout, make_axes(meshes[degree].layout, rank, whole.device))
        for case in CASES[num_ranks]:
            found[case] = trained(meshes[case[2]], case, Path(folder))
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

"""A small model trained by ranks, and the same arithmetic on one process: what ZeRO is compared with, bit for bit."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize, kernels
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.mesh import Axis
from octet.worker.mesh.axes import Axes
from octet.worker.parallel import Parallel
from octet.worker.parallel.norm import squared_norm
from tests.golden.record import digest
from tests.kit.small_model import Small

STEPS, MICRO_BATCHES, MAX_NORM = 2, 2, 0.05
NUM_UNUSED = 64 * 64
NUM_CONVERTED = 32 * 64 + 64 * 64 + 64 * 32 + 32 * 16 + NUM_UNUSED
NUM_BUCKETS = 3
"""Buckets of converted weights, at MAX_ELEMENTS."""
MAX_ELEMENTS = 6000
Result = dict[str, Any]
NetClass = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Net(Small):
    """With a parameter that nobody uses, and one whose elements are no multiple of 128."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(64, 64)
        self.shift = nn.Parameter(torch.zeros(16))


class Block(nn.Module):
    """With a layer without bias, one that nobody uses, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 80), nn.Linear(80, 32, bias=False)
        self.unused = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class DeepNet(nn.Module):
    """Repeated blocks, two of them with one shared weight, and a head tied to the layer before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[2].down.weight = self.blocks[1].down.weight
        self.head = nn.Linear(32, 32)
        self.head.weight = self.first.weight
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, :16]


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def make(
    level: str, share: int, num_shares: int, net_class: NetClass = Net, make_optimizer: MakeOptimizer = adamw
) -> tuple[Any, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = net_class()
    options = {"convert_heads": True, "statistics_every": 0} if LEVELS[level].has_own_fp8 else {}
    model, made = initialize(net, make_optimizer(net), level, **options)
    assert made is not None
    set_share(model, share, num_shares)
    return model, made


def set_share(model: nn.Module, share: int, num_shares: int) -> None:
    for layer in model.modules():
        if isinstance(layer, Float8Linear) and layer.gradient_position is not None:
            layer.gradient_position.share, layer.gradient_position.num_shares = share, num_shares


def loss_of(model: Any, rank: int, step: int, micro_batch: int) -> Tensor:
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(1000 * rank + 10 * step + micro_batch))
    return ((model(x) + model.shift - x[:, :16].tanh()) ** 2).mean() / MICRO_BATCHES


def step_on_ranks(parallel: Parallel, step: int) -> float:
    """One optimizer step of this rank. Returns its loss."""
    losses = []
    for micro_batch in range(MICRO_BATCHES - 1):
        with parallel.no_sync():
            losses.append(loss_of(parallel.model, parallel.data.rank, step, micro_batch))
            losses[-1].backward()
    losses.append(loss_of(parallel.model, parallel.data.rank, step, MICRO_BATCHES - 1))
    losses[-1].backward()
    parallel.synchronize()
    parallel.clip_grad_norm_(MAX_NORM)
    parallel.optimizer.step()
    parallel.publish()
    return sum(float(loss.detach()) for loss in losses)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return digest({"model": exact_state_dict(model), "optimizer": optimizer.state_dict()})


def parallel_on(
    axis: Axis, level: str, stage: int, net_class: NetClass = Net, make_optimizer: MakeOptimizer = adamw
) -> Parallel:
    model, optimizer = make(level, axis.rank, axis.size, net_class, make_optimizer)
    return Parallel(model, optimizer, Axes.of_data(axis), zero_stage=stage, max_elements=MAX_ELEMENTS)


def reference(
    level: str, stage: int, num_ranks: int, net_class: NetClass = Net, make_optimizer: MakeOptimizer = adamw
) -> Result:
    """One process: the ranks' micro-batches in the ranks' order, each rank's gradients stored, their mean rounded once.

    From stage 2 on the mean of each micro-batch is added up in fp32; below, each rank accumulates and then the mean is taken.
    """
    model, optimizer = make(level, 0, num_ranks, net_class, make_optimizer)
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    passes = [[micro_batch] for micro_batch in range(MICRO_BATCHES)] if stage >= 2 else [[*range(MICRO_BATCHES)]]
    for step in range(STEPS):
        found = [
            [gradients_of(model, rank, num_ranks, step, micro_batches) for rank in range(num_ranks)] for micro_batches in passes
        ]
        for rank in range(num_ranks):
            losses[rank].append(sum(of_ranks[rank][0] for of_ranks in found))
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = mean_of([[gradients[index] for _, gradients in of_ranks] for of_ranks in found])
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if stage == 0:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        else:
            norm = sum(squared_norm(gradient) for gradient in gradients).sqrt().float()
            for gradient in gradients:
                gradient.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "state": state_of(model, optimizer)}


def gradients_of(
    model: Any, rank: int, num_ranks: int, step: int, micro_batches: list[int]
) -> tuple[float, list[Tensor | None]]:
    """The loss of a rank's micro-batches, and the gradients that the rank has accumulated."""
    set_share(model, rank, num_ranks)
    positions = [layer.gradient_position for layer in model.modules() if isinstance(layer, Float8Linear)]
    counts = [position.count for position in positions if position is not None]
    parts = [loss_of(model, rank, step, micro_batch) for micro_batch in micro_batches]
    for part in parts:
        part.backward()
    if rank < num_ranks - 1:  # each rank counts its own roundings
        for position, count in zip(filter(None, positions), counts, strict=True):
            position.count = count
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return sum(float(part.detach()) for part in parts), gradients


def mean_of(passes: list[list[Any]]) -> Tensor | None:
    """The sum over backward passes of the mean over ranks, of one parameter; rounded once where gradients are in FP8."""
    first = passes[0][0]
    if first is None:
        return None
    if not isinstance(first, Float8Gradient):
        return added([added(gradients) / len(gradients) for gradients in passes])
    total = added([mean_of_codes(gradients) for gradients in passes])
    codes, dequant_scale = kernels.quantize(total, torch.float8_e4m3fn, amax=kernels.compute_amax(total))
    return Float8Gradient(codes.view(first.shape), dequant_scale, first.position)


def mean_of_codes(gradients: list[Float8Gradient]) -> Tensor:
    codes_RS = torch.stack([gradient.codes.view(torch.uint8).view(-1) for gradient in gradients]).view(torch.float8_e4m3fn)
    return kernels.mean_of_shards(codes_RS, torch.stack([gradient.dequant_scale for gradient in gradients]))[0]


def added(terms: list[Tensor]) -> Tensor:
    """The sum, term after term."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total

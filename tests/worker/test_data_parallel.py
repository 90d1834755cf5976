"""Gradients are averaged over real ranks (gloo): wide ones exactly, FP8 ones with one rounding for any number of ranks."""

import socket
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from worker import kernels
from worker.config import RankEnv
from worker.fp8.gradient import Float8Gradient, RoundingPosition
from worker.mesh import Mesh
from worker.parallel import average_gradients, broadcast_parameters

SHAPES = [(64, 96), (33, 7), (5,)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gradient_of(rank: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(SHAPES[index], generator=generator) * 10.0 ** (rank - index)


def average_on_rank(rank: int, world_size: int, port: int, folder: str, poison: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    env = RankEnv(rank=rank, world_size=world_size, master_port=port)
    with Mesh(env, torch.device("cpu")) as mesh:
        model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
        broadcast_parameters(model, mesh.data)
        for index, parameter in enumerate(model):
            gradient = gradient_of(rank, index)
            if poison and rank == world_size - 1:
                gradient[0] = torch.nan
            if index < 2:
                parameter.grad = Float8Gradient.quantize(gradient, RoundingPosition(0, 0))
            else:
                parameter.grad = gradient
        average_gradients(model.parameters(), mesh.data, "fp8")
        values = [(p.grad.dequantize() if isinstance(p.grad, Float8Gradient) else p.grad).clone() for p in model]
        torch.save({"gradients": values, "parameters": [p.detach() for p in model]}, f"{folder}/{rank}.pt")


def run(world_size: int, folder: Path, poison: bool = False) -> list[dict[str, list[torch.Tensor]]]:
    run_ranks(average_on_rank, (world_size, free_port(), str(folder), poison), world_size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_mean_is_right_and_the_same_on_every_rank(tmp_path: Path, world_size: int) -> None:
    results = run(world_size, tmp_path)
    for result in results[1:]:
        for name in ("gradients", "parameters"):
            for first, other in zip(results[0][name], result[name], strict=True):
                assert torch.equal(first, other)
    for index, mean in enumerate(results[0]["gradients"]):
        sent = [gradient_of(rank, index) for rank in range(world_size)]
        if index == 2:
            torch.testing.assert_close(mean, torch.stack(sent).mean(0))
            continue
        sent = [kernels.dequantize(*kernels.quantize(gradient, torch.float8_e4m3fn)) for gradient in sent]
        exact = torch.stack(sent).mean(0)
        # E4M3 keeps 3 bits: half a unit in the last place is 2^-4 of the value, or 2^-10 of the scale below its normals.
        error = (mean - exact).abs()
        amax = exact.abs().amax()
        assert bool((error <= exact.abs() * 2**-4 + amax * 2**-17).all())


def test_a_nan_of_one_rank_is_seen_by_all(tmp_path: Path) -> None:
    for result in run(2, tmp_path, poison=True):
        assert not any(torch.isfinite(gradient).all() for gradient in result["gradients"])

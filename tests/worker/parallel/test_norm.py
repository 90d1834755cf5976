"""Clipping of gradients that ranks hold in parts: as few ops on an accelerator for many gradients as for few."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.worker.common.config import RankEnv
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.mesh import Axis, Mesh
from octet.worker.parallel.norm import clip_together
from tests.worker.optim.test_clip import Ops
from tests.worker.parallel.compare import found_by_ranks
from tests.worker.parallel.reference import DeepNet, loss_of, parallel_on

CPU = torch.device("cpu")


def gradients_of(number: int) -> dict[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(5, 7, generator=draw) * 10.0 ** (index % 3) for index in range(number)]
    found: list[Tensor] = [
        Float8Gradient.quantize(value, RoundingPosition(0, index)) if index % 2 else value for index, value in enumerate(values)
    ]
    return {nn.Parameter(torch.zeros(5, 7)): gradient for gradient in found} | {nn.Parameter(torch.zeros(0)): torch.zeros(0)}


def test_one_op_reads_all_gradients_and_one_multiplies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    for number in (2, 12):
        gradients = gradients_of(number)
        counted_here = set(list(gradients)[1:])
        twins = {parameter: copy.deepcopy(gradient) for parameter, gradient in gradients.items()}
        axis = Axis("data", 1, 0, CPU)
        expected = clip_together(twins, 0.5, counted_here.__contains__, axis)
        with monkeypatch.context() as patch, cpu_as_accelerator(), Ops() as ops:
            patch.setattr(Float8Gradient, "dequantize", None)
            norm = clip_together(gradients, 0.5, counted_here.__contains__, axis)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)  # fp32 and float64
        assert norm > 0.5
        for gradient, twin in zip(gradients.values(), twins.values(), strict=True):
            torch.testing.assert_close(gradient + 0, twin + 0, rtol=1e-6, atol=0.0)
        counted.append({name: times for name, times in ops.found.items() if name != "detach"})  # a view, no launch
    assert counted[0] == counted[1]
    assert {name: counted[1].get(name, 0) for name in ("total_norm", "clip_", "mul_", "linalg_vector_norm")} == {
        "total_norm": 1, "clip_": 1, "mul_": 0, "linalg_vector_norm": 0,
    }  # fmt: skip


LEVELS, STAGES = ("O2", "O3-split", "bf16-amp"), (1, 2, 3)


def work(rank: int, ports: list[int], folder: str, _cases: Any) -> None:
    """Count the ops of clipping at each level and stage, and read the norm in float64 too."""
    torch.set_num_threads(1)
    found: dict[Any, Any] = {}
    with Mesh(RankEnv(rank=rank, world_size=2, master_port=ports[0]), CPU) as mesh:
        for level in LEVELS:
            for stage in STAGES:
                parallel = parallel_on(mesh.data, level, stage, DeepNet)
                loss_of(parallel.model, rank, 0, 0).backward()
                parallel.synchronize()
                expected = float(parallel.clip_grad_norm_(math.inf))
                with cpu_as_accelerator(), Ops() as ops:
                    norm = float(parallel.clip_grad_norm_(expected / 2))
                clipped = float(parallel.clip_grad_norm_(math.inf))
                found[level, stage] = {"norms": (norm, expected, clipped), "ops": ops.found}
    torch.save(found, f"{folder}/{rank}.pt")


def test_shards_are_read_and_multiplied_at_once(tmp_path: Path) -> None:
    """An op for the norm of all and one that multiplies; none for single gradients."""
    ranks = found_by_ranks(work, 2, tmp_path)
    for level in LEVELS:
        for stage in STAGES:
            for rank in ranks:
                norm, expected, clipped = rank[level, stage]["norms"]
                assert norm == pytest.approx(expected, rel=1e-6), (level, stage)
                assert clipped == pytest.approx(expected / 2, rel=1e-4)
                ops = rank[level, stage]["ops"]
                assert ops["total_norm"] == ops["clip_"] == 1, (level, stage)
                assert ops["mul_"] == ops["linalg_vector_norm"] == ops["dequantize"] == 0

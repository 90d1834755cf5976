"""Let FSDP2 send the gradients of weights that are held as codes in FP8, by torch's interface for a custom reduce-scatter.

Each rank rounds its gradient of a weight to E4M3 with one scale, and sends each other rank the codes of its rows: a byte an
element for fp32's four. The owner adds them in fp32 in the order of the ranks, and rounds the mean once, by the amax of the
whole. ZeRO does the same (`parallel/buckets.py`), so the bits are equal. Gradients of plain parameters travel in fp32.
Shape suffixes: R ranks, S elements of a rank's shard of one parameter, G weights of codes.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octet.worker import kernels
from octet.worker.fp8.fsdp import holds_codes, is_cut
from octet.worker.kernels import ScaledCodes, ScaleKind
from octet.worker.kernels.formats import E4M3
from octet.worker.mesh import Axis


def send_gradients_in_fp8(model: nn.Module) -> None:
    """Let all modules that `fully_shard` has got, and that hold weights of codes, send their gradients in FP8.

    Raises ValueError for a model without any.
    """
    of_codes: list[Any] = [module for module in model.modules() if is_cut(module) and any(map(holds_codes, _trained(module)))]
    if not of_codes:
        raise ValueError(
            "gradients is 'fp8' and fully_shard has cut no weight of codes; allowed: models of O1, O2, O3 and their variants, "
            "after fully_shard. Leave gradients out."
        )
    for module in of_codes:
        module.set_custom_reduce_scatter(Float8ReduceScatter(module))


class Float8ReduceScatter:
    """A reduce-scatter for one module of FSDP2, which calls it after the module's backward pass."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.axis: Axis | None = None
        """The ranks of the shards, known since the first call; it counts the bytes that were sent."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the gradients, or for this rank's means."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        """Write the means over the ranks of this rank's shards.

        input_tensor: fp32, for each rank its shards of all parameters. Raises ValueError for other dtypes and reductions, and
        where a parameter has no gradient.
        """
        if input_tensor.dtype != torch.float32 or op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(
                f"FSDP2 reduces gradients in {input_tensor.dtype} by {op}; allowed with gradients='fp8': fp32 and means. Leave "
                "out reduce_dtype and set_gradient_divide_factor, or gradients='fp8'."
            )
        if self.axis is None:
            self.axis = Axis("fsdp", dist.get_world_size(group), dist.get_rank(group), input_tensor.device, group)
        parts_RN = input_tensor.view(self.axis.size, -1)
        coded, plain = self._runs(parts_RN.shape[1])
        if coded:
            self._reduce_codes(parts_RN, coded, output_tensor)
        if plain:
            sent_RS = torch.cat([parts_RN[:, run.start : run.stop] for run in plain], dim=1)
            means = self.axis.sum_shares(sent_RS).div_(self.axis.size).split([len(run) for run in plain])
            for run, mean in zip(plain, means, strict=True):
                output_tensor[run.start : run.stop] = mean
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(self.axis.size)

    def _runs(self, num_elements: int) -> tuple[list[range], list[range]]:
        """Return where the shards of weights of codes, and of other parameters, lie in a rank's part."""
        assert self.axis is not None
        runs: tuple[list[range], list[range]] = ([], [])
        end = 0
        for parameter in _trained(self._module):
            row_size = parameter.numel() // max(1, len(parameter))
            run = range(end, end + -(-len(parameter) // self.axis.size) * row_size)
            runs[not holds_codes(parameter)].append(run)
            end = run.stop
        if end != num_elements:
            raise ValueError(
                f"FSDP2 reduces {num_elements} elements of a {type(self._module).__name__}, whose trained parameters have "
                f"{end} on a rank; allowed with gradients='fp8': a gradient for each parameter, in each backward pass. Leave "
                "out gradients='fp8', or freeze parameters that get none."
            )
        return runs

    def _reduce_codes(self, parts_RN: Tensor, runs: list[range], output: Tensor) -> None:
        axis = self.axis
        assert axis is not None
        sent_RS = parts_RN.new_empty((axis.size, sum(map(len, runs))), dtype=torch.uint8)
        scales, places, end = [], [], 0
        for run in runs:
            codes, scale = kernels.quantize_gradient(parts_RN[:, run.start : run.stop].contiguous(), E4M3.dtype)
            places.append(range(end, end := end + len(run)))
            sent_RS[:, places[-1].start : end] = codes.view(torch.uint8)
            scales.append(scale.reshape(()))
        exchange, gather = axis.start_exchange(sent_RS.view(E4M3.dtype)), axis.start_gather(torch.stack(scales))
        received_RS, scales_RG = exchange.wait(), gather.wait()
        means = [
            kernels.mean_of_shards(received_RS[:, place.start : place.stop], scales_RG[:, index])
            for index, place in enumerate(places)
        ]
        amaxes_G = axis.max_(torch.stack([amax.reshape(()) for _, amax in means]))
        new_scales_G = kernels.finite_or_nan(amaxes_G, E4M3.dtype)
        for index, (run, (mean, _)) in enumerate(zip(runs, means, strict=True)):
            codes, _ = kernels.quantize(mean, E4M3.dtype, amax=amaxes_G[index])
            output[run.start : run.stop] = kernels.values_of(ScaledCodes(codes, new_scales_G[index], ScaleKind.TENSOR))


def _trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a module of FSDP2 reduces together, in its order: those of children come first."""
    found: dict[nn.Parameter, None] = {}
    for each in _own_modules(module, set(), is_root=True):
        found.update(dict.fromkeys(one for one in each.parameters(recurse=False) if one.requires_grad))
    return list(found)


def _own_modules(module: nn.Module, seen: set[nn.Module], *, is_root: bool = False) -> Iterator[nn.Module]:
    if not is_root and is_cut(module):
        return
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _own_modules(child, seen)
    yield module

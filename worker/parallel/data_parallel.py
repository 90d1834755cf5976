"""Data parallel: every rank holds the whole model, and gradients are averaged once per optimizer step.

High-precision gradients are summed by the backend. FP8 gradients are never added in FP8, which would lose accuracy with
every rank: each rank receives all ranks' codes of its own shard (all-to-all), sums them in fp32, quantises the mean once
and shares it (all-gather). The same bytes travel as in an FP8 all-reduce, with one rounding instead of one per rank.
Codes travel as uint8: gloo refuses float8.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worker import kernels
from worker.fp8.gradient import Float8Gradient
from worker.parallel.ranks import Ranks

T = TypeVar("T", bound=Tensor)

# R ranks, S elements of one rank's shard
_BUCKET_ELEMENTS = 64 * 1024 * 1024


def broadcast_parameters(model: nn.Module, ranks: Ranks) -> None:
    """Make every rank's parameters and buffers those of rank 0, bit for bit."""
    if ranks.world_size == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach().view(-1).view(torch.uint8), src=0)


def average_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Replace every gradient by its mean over the ranks, in the format that it is stored in."""
    if ranks.world_size == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for bucket in _buckets([gradient for gradient in gradients if isinstance(gradient, Float8Gradient)]):
        _average_fp8(bucket, ranks)
    for wide in _buckets([gradient for gradient in gradients if not isinstance(gradient, Float8Gradient)]):
        _average_wide(wide, ranks)


def _average_wide(gradients: list[Tensor], ranks: Ranks) -> None:
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    dist.all_reduce(flat)
    # Each rank sends all shards but one twice: to where they are summed, and the sums to the others.
    ranks.sent_bytes["float32"] += 2 * flat.nbytes * (ranks.world_size - 1) // ranks.world_size
    flat /= ranks.world_size
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _average_fp8(gradients: list[Float8Gradient], ranks: Ranks) -> None:
    world_size = ranks.world_size
    shard_sizes = [-(-gradient.numel() // world_size) for gradient in gradients]
    sent_RS = torch.cat(
        [
            _padded(gradient.codes.view(torch.uint8).reshape(-1), size * world_size).view(world_size, size)
            for gradient, size in zip(gradients, shard_sizes, strict=True)
        ],
        dim=1,
    )
    received_RS = torch.empty_like(sent_RS)
    dist.all_to_all_single(received_RS, sent_RS)
    own_scales = torch.stack([gradient.dequant_scale.reshape(()) for gradient in gradients])
    scales_RG = torch.empty(world_size, len(gradients), dtype=own_scales.dtype, device=own_scales.device)
    dist.all_gather(list(scales_RG), own_scales)

    means = [
        kernels.mean_of_shards(codes_RS.view(torch.float8_e4m3fn), scales_RG[:, index])
        for index, codes_RS in enumerate(received_RS.split(shard_sizes, dim=1))
    ]
    # A NaN must win on every rank alike; MAX over NaN is not defined, over infinity it is.
    amaxes = torch.stack([amax for _, amax in means]).nan_to_num(nan=torch.inf, posinf=torch.inf)
    ranks.all_reduce_max(amaxes)
    codes_S = [kernels.quantize(mean, torch.float8_e4m3fn, amax=amax)[0] for (mean, _), amax in zip(means, amaxes, strict=True)]
    new_scales = kernels.finite_or_nan(amaxes, torch.float8_e4m3fn)
    own_S = torch.cat([codes.view(torch.uint8) for codes in codes_S])
    gathered_RS = torch.empty_like(sent_RS)
    dist.all_gather(list(gathered_RS), own_S)
    ranks.sent_bytes["float8_e4m3fn"] += 2 * own_S.nbytes * (world_size - 1)
    parts = gathered_RS.split(shard_sizes, dim=1)
    for gradient, codes_RS, dequant_scale in zip(gradients, parts, new_scales, strict=True):
        codes = codes_RS.reshape(-1)[: gradient.numel()].view(torch.float8_e4m3fn)
        gradient.codes.copy_(codes.view(gradient.codes.shape))
        gradient.dequant_scale.copy_(dequant_scale)


def _padded(flat: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(flat, (0, size - flat.numel()))


def _buckets(gradients: list[T]) -> Iterator[list[T]]:
    bucket: list[T] = []
    num_elements = 0
    for gradient in gradients:
        if bucket and num_elements + gradient.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket, num_elements = [], 0
        bucket.append(gradient)
        num_elements += gradient.numel()
    if bucket:
        yield bucket

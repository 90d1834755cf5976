"""The mean of FP8 codes over an axis. Sums are never kept in FP8, which would lose accuracy with every rank.

Each rank receives the codes of its own share from all ranks (exchange), sums them in fp32, quantizes the mean once and
gathers the other shares. The bytes on the wire equal those of an FP8 all-reduce, with one rounding in total instead of one
per rank.

Shape suffixes: R ranks, S elements of one rank's share, G tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker import kernels
from worker.mesh.axis import Axis

_E4M3 = torch.float8_e4m3fn


def average_codes(axis: Axis, codes: Sequence[Tensor], dequant_scales: Sequence[Tensor]) -> None:
    """Replace E4M3 codes, of any shapes, and their fp32 scales () by the codes and scales of their means, in place.

    A scale becomes NaN on every rank if any rank has a value that is not finite.
    """
    if axis.size == 1:
        return
    share_sizes = [-(-tensor.numel() // axis.size) for tensor in codes]
    sent_RS = torch.cat(
        [
            _padded(tensor.view(torch.uint8).reshape(-1), size * axis.size).view(axis.size, size)
            for tensor, size in zip(codes, share_sizes, strict=True)
        ],
        dim=1,
    ).view(_E4M3)
    received_RS = axis.exchange(sent_RS)
    scales_RG = axis.gather(torch.stack([dequant_scale.reshape(()) for dequant_scale in dequant_scales]))
    means = [
        kernels.mean_of_shards(codes_RS, scales_RG[:, index])
        for index, codes_RS in enumerate(received_RS.split(share_sizes, dim=1))
    ]
    amaxes_G = axis.max_(torch.stack([amax for _, amax in means]))
    own = [kernels.quantize(mean_S, _E4M3, amax=amax)[0] for (mean_S, _), amax in zip(means, amaxes_G, strict=True)]
    gathered_RS = axis.gather(torch.cat([codes_S.view(torch.uint8) for codes_S in own]).view(_E4M3))
    new_scales_G = kernels.finite_or_nan(amaxes_G, _E4M3)
    parts = gathered_RS.split(share_sizes, dim=1)
    for index, codes_RS in enumerate(parts):
        flat = codes_RS.view(torch.uint8).reshape(-1)[: codes[index].numel()].view(_E4M3)
        codes[index].copy_(flat.view(codes[index].shape))
        dequant_scales[index].copy_(new_scales_G[index])


def _padded(flat: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(flat, (0, size - flat.numel()))

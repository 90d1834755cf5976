"""Data parallel: every rank holds the whole model, and gradients are averaged once per optimizer step.

`PrecisionSpec.gradient_communication` says in which format gradients travel: FP8 codes are averaged as codes
(`worker/mesh/codes.py`), everything else is summed in fp32 by the backend.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from api_schemas.levels import CommunicationDtype
from worker.fp8.gradient import Float8Gradient
from worker.mesh import Axis, average_codes

T = TypeVar("T", bound=Tensor)

_BUCKET_ELEMENTS = 64 * 1024 * 1024


def broadcast_parameters(model: nn.Module, data: Axis) -> None:
    """Give every data rank the parameters and buffers of the first rank, bit for bit."""
    for tensor in (*model.parameters(), *model.buffers()):
        data.broadcast_(tensor)


def average_gradients(parameters: Iterable[nn.Parameter], data: Axis, communication: CommunicationDtype) -> None:
    """Replace every gradient by its mean over the data ranks, in the format in which it is stored.

    communication: the format in which gradients of converted layers travel. "fp8" sends codes unchanged; "fp32" decodes,
    sums and quantizes them again. All other gradients travel in fp32.
    """
    if data.size == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    in_codes = [gradient for gradient in gradients if communication == "fp8" and isinstance(gradient, Float8Gradient)]
    for bucket in _buckets(in_codes):
        average_codes(data, [gradient.codes for gradient in bucket], [gradient.dequant_scale for gradient in bucket])
    sent = {id(gradient) for gradient in in_codes}
    for wide in _buckets([gradient for gradient in gradients if id(gradient) not in sent]):
        _average_wide(wide, data)


def _average_wide(gradients: list[Tensor], data: Axis) -> None:
    flat = data.sum_(torch.cat([_values(gradient) for gradient in gradients]))
    flat /= data.size
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        mean = part.view(gradient.shape)
        if isinstance(gradient, Float8Gradient):
            quantized = Float8Gradient.quantize(mean, gradient.position)
            gradient.codes.copy_(quantized.codes)
            gradient.dequant_scale.copy_(quantized.dequant_scale)
        else:
            gradient.copy_(mean)


def _values(gradient: Tensor) -> Tensor:
    wide = gradient.dequantize() if isinstance(gradient, Float8Gradient) else gradient
    return wide.reshape(-1).float()


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

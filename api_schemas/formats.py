"""The bytes of every stored format, without torch: what a planner adds up, and what codecs are tested against.

A format stores each element, may store parts for each block of 128 consecutive elements of the flattened tensor (a scale, a
step), and may store one scale for the whole tensor. Classes of bytes are those of `octet.worker.memory_report`.
"""

from typing import NamedTuple

from octet.api_schemas.levels import Level
from octet.api_schemas.optimization import OPTIMIZER_STATES, OptimizerName

BLOCK = 128
"""Elements that share the parts of a block."""
MIN_QUANTIZED_ELEMENTS = 4096
"""Smaller tensors (norms, biases) keep fp32 states: there is nothing to save, and they are the most sensitive."""
_FP32_BYTES = 4


class StoredFormat(NamedTuple):
    """Bytes of codes for each element, and of what belongs to a block or to the whole tensor: scales, and other parts."""

    element_bytes: int
    block_scale_bytes: int = 0
    block_other_bytes: int = 0
    tensor_scale_bytes: int = 0

    def num_code_bytes(self, num_elements: int) -> int:
        """Bytes of a stored tensor without its scales."""
        return num_elements * self.element_bytes + _num_blocks(num_elements) * self.block_other_bytes

    def num_scale_bytes(self, num_elements: int) -> int:
        """Bytes of its scales."""
        return _num_blocks(num_elements) * self.block_scale_bytes + self.tensor_scale_bytes

    def num_bytes(self, num_elements: int) -> int:
        """Bytes of a stored tensor, scales included."""
        return self.num_code_bytes(num_elements) + self.num_scale_bytes(num_elements)


STATE_FORMATS = {
    "fp32": StoredFormat(4),
    "fp16-block": StoredFormat(2, block_scale_bytes=4),
    "fp8-dre": StoredFormat(1, block_scale_bytes=4, block_other_bytes=2),
    "int8-companded": StoredFormat(1, block_scale_bytes=4),
    "uint8-companded": StoredFormat(1, block_scale_bytes=4),
}
WEIGHT_FORMATS = {
    "fp32": StoredFormat(4),
    "fp16+scale": StoredFormat(2, tensor_scale_bytes=4),
    "fp8": StoredFormat(1, tensor_scale_bytes=4),
}
MASTER_WEIGHT_FORMATS = {
    "none": StoredFormat(0),
    "fp16+scale": StoredFormat(2, tensor_scale_bytes=4),
    "int8-residual": StoredFormat(1),
}
GRADIENT_FORMATS = {"fp32": StoredFormat(4), "fp8": StoredFormat(1, tensor_scale_bytes=4)}


def converted_weight_bytes(level: Level, num_elements: int, optimizer: OptimizerName = "adamw") -> dict[str, int]:
    """Bytes, by class, of the weight of a converted layer with its gradient and states on one rank, scales included.

    `other`: the largest magnitude that an encoded weight keeps. Statistics and delayed scaling's windows, whose size does not
    depend on the layer's, are not part of it.
    """
    formats = {
        "weights": WEIGHT_FORMATS[level.weight],
        "master_weights": MASTER_WEIGHT_FORMATS[level.master_weight],
        "gradients": GRADIENT_FORMATS[level.weight_gradient],
    }
    other_bytes = 0 if level.weight == "fp32" else _FP32_BYTES
    return _by_class(formats | state_formats(level, num_elements, optimizer), num_elements) | {"other": other_bytes}


def plain_parameter_bytes(level: Level, num_elements: int, optimizer: OptimizerName = "adamw") -> dict[str, int]:
    """Bytes, by class, of a parameter outside converted layers: fp32 with an fp32 gradient, its states as the level says."""
    formats = {"weights": WEIGHT_FORMATS["fp32"], "gradients": GRADIENT_FORMATS["fp32"]}
    return _by_class(formats | state_formats(level, num_elements, optimizer), num_elements)


def state_formats(level: Level, num_elements: int, optimizer: OptimizerName = "adamw") -> dict[str, StoredFormat]:
    """Return the format of each of the optimizer's states of a parameter of so many elements."""
    is_small = num_elements < MIN_QUANTIZED_ELEMENTS
    return {state: STATE_FORMATS["fp32" if is_small else getattr(level, state)] for state in OPTIMIZER_STATES[optimizer]}


def _by_class(formats: dict[str, StoredFormat], num_elements: int) -> dict[str, int]:
    found = dict.fromkeys(("weights", "master_weights", "gradients", "exp_avg", "exp_avg_sq", "scales", "other"), 0)
    for kind, stored in formats.items():
        found[kind] += stored.num_code_bytes(num_elements)
        found["scales"] += stored.num_scale_bytes(num_elements)
    return found


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)

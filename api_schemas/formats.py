"""The bytes of every stored format, without torch: what a planner adds up, and what codecs are tested against.

A format stores each element, may store parts for each block of 128 consecutive elements of the flattened tensor (a scale, a
step), and may store one scale for the whole tensor. Classes of bytes are those of `octet.worker.memory_report`.
"""

from typing import NamedTuple

from octet.api_schemas.levels import Level
from octet.api_schemas.optimization import MATRIX_STATES, OPTIMIZER_STATES, OptimizerName

BLOCK = 128
"""Elements that share the parts of a block."""
MIN_QUANTIZED_ELEMENTS = 4096
"""Smaller tensors (norms, biases) keep fp32 states: there is nothing to save, and they are the most sensitive."""
AMAX_BYTES = 4
"""The largest magnitude that an encoded weight keeps."""


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


def weight_bytes(level: Level, is_converted: bool, num_elements: int, num_owned: int) -> dict[str, int]:
    """Return the bytes, by class, of a whole weight and of its master. num_owned: elements that the rank steps.

    is_converted: whether it is the weight of a layer that the level converts; all others are fp32.
    """
    weight = WEIGHT_FORMATS[level.weight if is_converted else "fp32"]
    master = MASTER_WEIGHT_FORMATS[level.master_weight if is_converted else "none"]
    return {
        "weights": weight.num_code_bytes(num_elements),
        "master_weights": master.num_code_bytes(num_owned),
        "scales": weight.num_scale_bytes(num_elements) + master.num_scale_bytes(num_owned),
        "other": AMAX_BYTES if is_converted and level.weight != "fp32" else 0,
    }


def gradient_bytes(stored: str, num_owned: int) -> dict[str, int]:
    """Return the bytes, by class, of a gradient in one of the formats."""
    form = GRADIENT_FORMATS[stored]
    return {"gradients": form.num_code_bytes(num_owned), "scales": form.num_scale_bytes(num_owned)}


def moment_bytes(
    level: Level, optimizer: OptimizerName, num_elements: int, num_owned: int, *, is_matrix: bool = False
) -> dict[str, int]:
    """Return the bytes, by class, of the optimizer's states.

    num_elements: of the whole parameter, which decide the format. is_matrix: Muon would orthogonalize it.
    """
    is_small = num_elements < MIN_QUANTIZED_ELEMENTS
    found = {"scales": 0}
    states = MATRIX_STATES.get(optimizer) if is_matrix else None
    for state in OPTIMIZER_STATES[optimizer] if states is None else states:
        stored = STATE_FORMATS["fp32" if is_small else getattr(level, state)]
        found[state] = stored.num_code_bytes(num_owned)
        found["scales"] += stored.num_scale_bytes(num_owned)
    return found


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)

"""Check, cut and copy the saved states that an optimizer is given to continue from."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octet.worker.fp8.casts import TRAINABLE_DTYPES
from octet.worker.optim.codecs import Codec, Parts, select_entries
from octet.worker.optim.rules.rule import Rule

NUMBERS = "weight_numbers"
"""The scale and the amax of a shard's codes, among the states of its parameter."""
CUT = "num_ranks"
"""The number of ranks between which the rows of a shard's parameter were cut, among its states."""


def check_states(saved: Mapping[str, Any], rule: Rule) -> None:
    """Reject the states of another rule."""
    names = [name for name in saved if name not in ("step", "master_weights", NUMBERS, CUT)]
    if set(names) != set(rule.state_codecs):
        raise ValueError(
            f"the saved states are {', '.join(names)}; allowed: {', '.join(rule.state_codecs)}, the states of {rule.name}. "
            "Continue with the optimizer that saved them, or start this one without them."
        )


def check_parts(name: str, parts: Parts, codec: Codec) -> None:
    """Reject a saved state that consists of other parts; the kernel would otherwise read a null pointer."""
    if set(parts) != set(codec.parts):
        raise ValueError(
            f"the saved {name} consists of {', '.join(parts)}; allowed: {', '.join(codec.parts)}. Another version of Octet "
            "saved it: finish the run with that version, or start a new optimizer from the saved weights."
        )


def entries_of_piece(parts: Parts, elements: range, num_elements: int) -> Parts:
    """Return the entries of saved parts for some elements of a parameter; all if the parts are of a piece already.

    num_elements: of the whole parameter.
    """
    if parts["codes"].numel() != num_elements or len(elements) == num_elements:
        return parts
    return select_entries(parts, elements)


def copy_parts(parts: Parts, device: torch.device) -> dict[str, Tensor]:
    """Copy the tensors of a state to a device."""
    return {name: part.to(device, copy=True) for name, part in parts.items()}


def wrong_dtype(parameter: Tensor) -> str:
    """Say that a parameter cannot be trained in its dtype."""
    return f"a parameter has dtype {parameter.dtype}; allowed: {', '.join(map(str, TRAINABLE_DTYPES))}."

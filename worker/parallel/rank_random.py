"""Random numbers of each rank's own: dropout on one rank's samples differs from dropout on another's.

A script that seeds torch draws the same numbers on all ranks, which it may need, for a shuffle that all share. So a rank has
numbers of its own inside the model's forward pass in training, and the script's outside. They follow from the script's: one
number is drawn for each pass, so a script that saves torch's state and resumes draws the same again.
"""

from typing import Any

import torch
from torch import Tensor, nn

_STRIDE = 0x9E3779B97F4A7C15


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return torch's generators of a rank on this device: the CPU's, and the device's own."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators of a rank on this device."""
    # `torch.manual_seed` formats the stack for each backend: 0.65 ms of a step.
    for generator in generators_of(device):
        generator.manual_seed(seed)


class RankRandom:
    """The numbers of one rank. Passes that are computed again for activation checkpointing keep theirs."""

    def __init__(self, device: torch.device, rank: int) -> None:
        """rank: its number among the ranks that draw different numbers."""
        self._device, self._rank = device, rank
        self._script_states: list[Tensor] | None = None

    def around(self, model: nn.Module) -> None:
        """Draw the rank's own numbers inside the model's forward pass."""
        # Here and not as a decorator: it loads the compiler, which jobs do not need
        model.register_forward_pre_hook(torch.compiler.disable(self._enter))
        model.register_forward_hook(torch.compiler.disable(self._leave), always_call=True)

    def enter(self, *, is_training: bool) -> None:
        """Draw the rank's own numbers from now on, in training."""
        if not is_training or self._script_states is not None:
            return
        seed = (int(torch.randint(1 << 62, ())) + _STRIDE * (self._rank + 1)) % 2**63
        self._script_states = [generator.get_state() for generator in generators_of(self._device)]
        seed_generators(self._device, seed)

    def leave(self) -> None:
        """Draw the script's numbers again."""
        if self._script_states is not None:
            for generator, state in zip(generators_of(self._device), self._script_states, strict=True):
                generator.set_state(state)
            self._script_states = None

    def _enter(self, model: nn.Module, *_arguments: Any) -> None:
        self.enter(is_training=model.training)

    def _leave(self, *_arguments: Any) -> None:
        self.leave()

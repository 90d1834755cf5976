"""Find how large the inputs of converted layers become, for servers that scale all of a layer's inputs by one number.

with Calibration(model) as calibration:
    for batch in batches:
        model(batch)
form = Fp8Form(activations="static", input_scales=calibration.input_scales())
"""

import math
from types import TracebackType

import torch
from torch import Tensor, nn

from octet.worker.fp8.stacks import stacks_of
from octet.worker.pretrained.compressed import ACTIVATION_MAX
from octet.worker.pretrained.layouts import layout_of_model
from octet.worker.pretrained.write import layers_in_codes


class Calibration:
    """Watches the inputs of the layers that an export writes as codes, in whatever passes are made inside its block."""

    def __init__(self, model: nn.Module) -> None:
        """model: at its level; in evaluation, as a server computes."""
        self._names = layers_in_codes(model, layout_of_model(model, in_fp8=True))
        self._model = model
        self._largest: dict[str, Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "Calibration":
        for name in self._names:
            layer = self._model.get_submodule(name)
            self._hooks.append(layer.register_forward_pre_hook(lambda _, inputs, name=name: self._look_at(name, inputs[0])))
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def input_scales(self) -> dict[str, float]:
        """Return the scale of each layer's inputs, by the model's name: the largest magnitude over the largest E4M3 value.

        An expert that no token has reached takes the largest scale of those beside it, as servers do for all of them. Raises
        ValueError for a layer that had no input but zeros, and for one that had an input that is not finite.
        """
        seen = {name: float(amax) for name, amax in self._largest.items()}
        beside = {part: stack.parts for stack in stacks_of(self._model) for part in stack.parts}
        found = {}
        for name in self._names:
            of_experts = [seen.get(part.removesuffix(".weight"), 0.0) for part in beside.get(f"{name}.weight", ())]
            found[name] = seen.get(name, max(of_experts, default=0.0))
        if missing := [name for name, amax in found.items() if amax == 0]:
            raise ValueError(
                f"calibration has seen no input of {missing[0]} but zeros, nor of {len(missing) - 1} others; allowed: tokens "
                "that reach each. Calibrate on more, or let servers scale inputs by token (activations: dynamic)."
            )
        if wrong := [name for name, amax in found.items() if not math.isfinite(amax)]:
            raise ValueError(
                f"calibration has seen inputs of {wrong[0]} with the largest magnitude {found[wrong[0]]}; allowed: finite. "
                "Export an earlier checkpoint, or calibrate on other tokens."
            )
        return {name: amax / ACTIVATION_MAX for name, amax in found.items()}

    def _look_at(self, name: str, input_TK: Tensor) -> None:
        if input_TK.numel():
            amax = input_TK.detach().abs().amax().float()
            self._largest[name] = torch.maximum(self._largest.get(name, amax), amax)

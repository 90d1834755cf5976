"""A read-only view of what an optimizer holds for one parameter."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octet.worker.optim.codecs import Parts
from octet.worker.optim.origin import Origin
from octet.worker.optim.rules.rule import Group
from octet.worker.optim.weights import QuantizedWeight


@dataclass(frozen=True, eq=False)
class HeldParameter:
    """A parameter with what the optimizer keeps for it. The tensors are the optimizer's own: a step changes them in place.

    parameter: of the model; under ZeRO a 1-D piece of it, of codes where `weight` is not None.
    state: by name the stored states, dicts of tensors, and `step`; empty before they are allocated.
    codecs: the name of each state's codec, in the rule's order.
    """

    parameter: Tensor
    group: Group
    origin: Origin
    state: Mapping[str, Any]
    codecs: tuple[str, ...]
    weight: QuantizedWeight | None

    @property
    def dequant_scale(self) -> Tensor | None:
        """The scale of the codes, fp32 (); None for a plain parameter."""
        return None if self.weight is None else self.weight.dequant_scale

    @property
    def amax(self) -> Tensor | None:
        """The largest magnitude of the whole weight's values, fp32 (); None for a plain parameter."""
        return None if self.weight is None else self.weight.amax

    @property
    def residual(self) -> Tensor | None:
        """The INT8 digits that E4M3 codes round away, for the elements that are stepped; None where nothing holds them."""
        return None if self.weight is None else self.weight.residual

    @property
    def master(self) -> Parts | None:
        """The master weight, flat FP16 codes with one scale; None where the codes are fine enough to be trained."""
        master: Parts | None = self.state.get("master_weights")
        return master

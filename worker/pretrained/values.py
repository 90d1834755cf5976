"""The values of a model that is divided before it has any, drawn as its class draws them. `load.py` reads those of a folder.

A model is built on `meta`, its parameters then stand on their device without memory (`common/deferred.py`). It is converted and
divided like this, and `worker/parallel/materialize.py` reads one whole parameter after another.
"""

import torch
from torch import Tensor, nn

from octet.worker.common.deferred import defer_parameters, move_buffers
from octet.worker.data.order import seed_of
from octet.worker.models import TrainedModel
from octet.worker.models.initial import Initial, draw, skip
from octet.worker.parallel.materialize import Unfilled, unfilled_parameters


@torch.no_grad()
def change_values(values: Tensor, name: str, relative: float, seed: int) -> Tensor:
    """Change each value in place by a normally distributed share of it, of the standard deviation `relative`; return them.

    name: of the parameter. Each has random numbers of its own, so that ranks which hold only some change them alike.
    """
    if relative:
        generator = torch.Generator().manual_seed(seed_of("change of the start", seed, name))
        values.mul_(1 + relative * torch.randn(values.shape, generator=generator).to(values.device))
    return values


def change_start(model: nn.Module, relative: float, seed: int) -> None:
    """Change every parameter of a whole model as `change_values` does."""
    for name, parameter in model.named_parameters():
        change_values(parameter, name, relative, seed)


class DrawnValues:
    """Draws the values of a model of ours from its seed. It is also the model's `WeightSource` in `prepare`."""

    def __init__(self, model: TrainedModel, seed: int, device: torch.device, start_change: float = 0.0) -> None:
        """model: on `meta`; its parameters are on the device afterwards, without memory. start_change: see `change_values`."""
        self.device, self.unfilled = device, unfilled_parameters(model)
        self._seed, self._start_change = seed, start_change
        self._initial = {parameter.names[0]: _initial(model, parameter) for parameter in self.unfilled}
        self._generator = torch.Generator().manual_seed(seed)
        defer_parameters(model, device)

    def read(self, parameter: Unfilled) -> Tensor:
        """Return the next parameter's whole values, fp32."""
        drawn = draw(torch.empty(parameter.shape), self._initial[parameter.names[0]], self._generator)
        return change_values(drawn, parameter.names[0], self._start_change, self._seed).to(self.device)

    def scale_of(self, parameter: Unfilled) -> Tensor | None:
        """Return None: drawn values are no codes."""
        return None

    def skip(self, parameter: Unfilled) -> None:
        """Pass over the next parameter's random numbers."""
        skip(parameter.shape.numel(), self._initial[parameter.names[0]], self._generator)

    def fill(self, layer: nn.Module) -> None:
        """Leave the layer without values."""

    def dequant_scale(self, weight: Tensor) -> Tensor | None:
        """Return None: drawn values are no codes."""
        return None

    def finish(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Move the buffers, which have values, to the device."""
        move_buffers(model, self.device)


def _initial(model: TrainedModel, parameter: Unfilled) -> Initial:
    initial = model.initial(parameter.names[0], len(parameter.shape))
    assert initial is not None, "a model whose class draws its values is built whole"
    return initial

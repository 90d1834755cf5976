"""Dynamic loss scaling for fp16, built into the model so that the training loop stays as it is.

The gradient that enters at the model's output is multiplied by the loss scale, and every parameter's gradient is divided
by it before it is accumulated. So fp16 products see large gradients, while clipping, accumulation and the optimizer see
true ones. After a step with a non-finite gradient the scale is halved; after `growth_interval` good ones it is doubled
(Micikevicius et al., "Mixed Precision Training", 2018, section 3.2).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

NAME = "octet_loss_scaling"
"""The submodule's name in the model; its buffers are in the model's `state_dict`."""


LARGEST_SCALE = 2.0**32


class LossScaling(nn.Module):
    """The scale and how long it has been good. A power of two, so that scaling rounds nothing."""

    loss_scale: Tensor

    def __init__(self, parameters: Iterable[nn.Parameter], initial_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        super().__init__()
        self.growth_interval = growth_interval
        self.num_good_steps = 0
        self.num_skipped_steps = 0
        self._unscaled = [parameter for parameter in parameters if parameter.requires_grad]
        self.register_buffer("loss_scale", torch.tensor(initial_scale, device=self._unscaled[0].device))
        self._hook_parameters()

    def update(self, num_skipped_steps: int) -> None:
        """Grow or shrink the scale after an optimizer step, given how many steps the optimizer has skipped so far."""
        if num_skipped_steps > self.num_skipped_steps:
            self.loss_scale.div_(2).clamp_(min=1.0)
            self.num_good_steps = 0
        else:
            self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.loss_scale.mul_(2).clamp_(max=LARGEST_SCALE)
            self.num_good_steps = 0
        self.num_skipped_steps = num_skipped_steps

    def get_extra_state(self) -> Tensor:
        """What `state_dict` keeps beside the scale."""
        return torch.tensor([self.num_good_steps, self.num_skipped_steps])

    def set_extra_state(self, state: Tensor) -> None:
        self.num_good_steps, self.num_skipped_steps = state.tolist()

    def _hook_parameters(self) -> None:
        for parameter in self._unscaled:
            parameter.register_hook(lambda gradient: gradient / self.loss_scale)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the hooks, which copied parameters lose."""
        super().__setstate__(state)
        self._hook_parameters()


def scale_losses(model: nn.Module) -> LossScaling:
    """Give a model its loss scaling."""
    scaling = LossScaling(model.parameters())
    model.register_module(NAME, scaling)
    model.register_forward_hook(_scale_gradients_of_outputs)
    return scaling


def _scale_gradients_of_outputs(model: nn.Module, _inputs: Any, outputs: Any) -> Any:
    scaling = model.get_submodule(NAME)
    assert isinstance(scaling, LossScaling)

    def scale(output: Tensor) -> Tensor:
        return _ScaleGradient.apply(output, scaling.loss_scale) if output.requires_grad else output

    return tree_map_only(Tensor, scale, outputs)


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss_scale: Tensor) -> Tensor:
        ctx.save_for_backward(loss_scale)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (loss_scale,) = ctx.saved_tensors
        return grad_output * loss_scale, None

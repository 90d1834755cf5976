"""Dynamic loss scaling for fp16, built into the model so that the training loop stays as it is.

The gradient that enters at the model's output is multiplied by the loss scale; every parameter's gradient is divided by it
before it is accumulated, and so is the gradient that leaves at the model's input. So fp16 products see large gradients, while
clipping, accumulation, the optimizer and what comes before the model see true ones. After a step with a non-finite gradient
the scale is halved; after `growth_interval` good ones it is doubled
(Micikevicius et al., "Mixed Precision Training", 2018, section 3.2).
"""

from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.kernels.torch_private import tree_map_only

LARGEST_SCALE = 2.0**32
STATE_BUFFER = "octet_loss_scaling_state"


class LossScaling:
    """The scale, a power of two so that scaling rounds nothing, and how long it has been good.

    `state` holds the scale, the good steps in a row and the skipped steps seen; it is a buffer of the model, and so in its
    `state_dict`. It is read from the model each time: a move to another device replaces it.
    """

    def __init__(self, model: nn.Module, initial_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.growth_interval = growth_interval
        self.model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        state = torch.tensor([initial_scale, 0.0, 0.0], dtype=torch.float64, device=self.parameters[0].device)
        model.register_buffer(STATE_BUFFER, state)
        self._hook(self.parameters)

    @property
    def state(self) -> Tensor:
        """fp64, (3)."""
        return self.model.get_buffer(STATE_BUFFER)

    @property
    def loss_scale(self) -> Tensor:
        """The present scale: fp32, ()."""
        return self.state[0].float()

    @torch.no_grad()
    def update(self, num_skipped_steps: Tensor) -> None:
        """Grow or shrink the scale after an optimizer step. The host does not wait for the device.

        num_skipped_steps: how many steps the optimizer has skipped so far, int64 ().
        """
        loss_scale, num_good_steps, num_skipped_before = self.state.unbind()
        num_skipped, num_good_steps = num_skipped_steps.to(loss_scale), num_good_steps + 1
        is_bad, is_due = num_skipped > num_skipped_before, num_good_steps == self.growth_interval
        shrunk, grown = (loss_scale / 2).clamp(min=1.0), (loss_scale * 2).clamp(max=LARGEST_SCALE)
        loss_scale = torch.where(is_bad, shrunk, torch.where(is_due, grown, loss_scale))
        num_good_steps = torch.where(is_bad | is_due, 0.0, num_good_steps)
        self.state.copy_(torch.stack((loss_scale, num_good_steps, num_skipped)))

    def scale_gradients_of_outputs(self, _model: nn.Module, _inputs: Any, outputs: Any) -> Any:
        """A forward hook: the model's outputs, through which gradients come back multiplied."""
        return _scale_gradients(outputs, self.loss_scale)

    def unscale_gradients_of_inputs(self, _model: nn.Module, inputs: Any, named_inputs: Any) -> Any:
        """A forward pre-hook: the model's inputs, through which gradients go on divided, to what comes before the model."""
        if not torch.compiler.is_compiling():
            self._follow_parameters()
        return _scale_gradients((inputs, named_inputs), self.loss_scale.reciprocal())

    def _follow_parameters(self) -> None:
        """Hook the parameters that were thawed or made since: their gradients would keep the loss scale."""
        present = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        known = set(map(id, self.parameters))
        self._hook([parameter for parameter in present if id(parameter) not in known])
        frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]  # they keep their hook
        self.parameters = present + frozen

    def _hook(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.register_hook(lambda gradient: gradient / self.loss_scale)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the hooks, which copied parameters lose."""
        self.__dict__.update(state)
        self.parameters = [parameter for parameter in self.parameters if parameter.requires_grad]
        self._hook(self.parameters)


def scale_losses(model: nn.Module) -> LossScaling:
    """Scale what comes back from a model's outputs. The state is a buffer of the model, so that checkpoints hold it."""
    scaling = LossScaling(model)
    model.register_forward_hook(scaling.scale_gradients_of_outputs)
    model.register_forward_pre_hook(scaling.unscale_gradients_of_inputs, with_kwargs=True)
    return scaling


def _scale_gradients(tensors: Any, factor: Tensor) -> Any:
    """The tensors of a tree, with their gradients multiplied where they have any."""

    def scale(tensor: Tensor) -> Tensor:
        return _ScaleGradient.apply(tensor, factor) if tensor.requires_grad else tensor

    return tree_map_only(Tensor, scale, tensors)


class _ScaleGradient(torch.autograd.Function):
    """The identity; it multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss_scale: Tensor) -> Tensor:
        ctx.save_for_backward(loss_scale)
        return output.clone() if output.dim() == 0 else output.view_as(output)  # a loss may be scaled in place, a view may not

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (loss_scale,) = ctx.saved_tensors
        return grad_output * loss_scale, None

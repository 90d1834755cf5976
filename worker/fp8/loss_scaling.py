"""Dynamic loss scaling for fp16, built into the model so that the training loop stays as it is.

The gradient that enters at the model's output is multiplied by the loss scale; what the model's graph sends to a leaf, which is
most often a parameter, is divided by it, and so is the gradient that leaves at the model's input. So fp16 products see large
gradients, while clipping, accumulation, the optimizer and what comes before the model see true ones. A gradient that reaches a
parameter from elsewhere, as that of a penalty which is added to the loss, was never multiplied and stays as it is. After a
step with a non-finite gradient the scale is halved; after `growth_interval` good ones it is doubled
(Micikevicius et al., "Mixed Precision Training", 2018, section 3.2).

Two kinds of passes have no graph to look through: one within the backward pass, which reentrant checkpoints make, and that of a
model which torch.compile got as a whole. There hooks of the parameters divide all that arrives.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from octet.worker.kernels.torch_private import backward_pass, call_after_backward, tree_leaves, tree_map_only

LARGEST_SCALE = 2.0**32
STATE_BUFFER = "octet_loss_scaling_state"
_IS_UNSCALED = "octet_is_unscaled"


class LossScaling:
    """The scale, a power of two so that scaling rounds nothing, and how long it has been good.

    `state` holds the scale, the good steps in a row and the skipped steps seen; it is a buffer of the model, and so in its
    `state_dict`. It is read from the model each time: a move to another device replaces it.
    """

    def __init__(self, model: nn.Module, initial_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.growth_interval = growth_interval
        self.model = model
        self.is_compiled = False
        """The model was compiled as a whole, so that autograd sees one node."""
        self._pass: int | None = None
        """The number of the backward pass that has entered the model and has not ended."""
        self._waiting: dict[int, Tensor] = {}
        """Gradients in fp32 by the id of the parameter that they will reach, which other code has computed in fp16."""
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
        if torch.compiler.is_compiling():
            self.is_compiled = True
            return _scale_gradients(outputs, self.loss_scale)
        ends = [tensor.grad_fn for tensor in tree_leaves(outputs) if isinstance(tensor, Tensor) and tensor.grad_fn is not None]
        for node, leaves in _edges_to_leaves(ends, self):
            node.register_hook(partial(self._unscale_edges, leaves))
        return _scale_gradients(outputs, self.loss_scale, self._enter)

    def unscale_gradients_of_inputs(self, _model: nn.Module, inputs: Any, named_inputs: Any) -> Any:
        """A forward pre-hook: the model's inputs, through which gradients go on divided, to what comes before the model."""
        if torch.compiler.is_compiling():
            return _scale_gradients((inputs, named_inputs), self.loss_scale.reciprocal())
        self._follow_parameters()
        if backward_pass() < 0:
            self._pass = None  # an exception may have ended the pass before
            self._waiting.clear()
        return _scale_gradients((inputs, named_inputs), self.loss_scale.reciprocal(), model=self)

    def _enter(self) -> None:
        """Note that the backward pass which runs has come to the model."""
        before = self._pass
        if before != backward_pass():
            self._pass = backward_pass()
            call_after_backward(partial(setattr, self, "_pass", before))

    def _unscale_edges(self, leaves: dict[int, Tensor], gradients: tuple[Tensor | None, ...], _outputs: Any) -> Any:
        """Divide the gradients that a node sends to leaves, by number. What is narrower than its leaf waits for it in fp32."""
        unscaled = list(gradients)
        for number, leaf in leaves.items():
            gradient = gradients[number]
            if gradient is None:
                continue
            is_exact = gradient.dtype == leaf.dtype or gradient.dtype.itemsize >= torch.float32.itemsize
            if is_exact or not any(leaf is parameter for parameter in self.parameters):
                unscaled[number] = gradient / self.loss_scale
                continue
            wide = gradient.float() / self.loss_scale
            self._waiting[id(leaf)] = self._waiting[id(leaf)] + wide if id(leaf) in self._waiting else wide
            unscaled[number] = torch.zeros_like(gradient)
        return tuple(unscaled)

    def _unscale_whole(self, gradient: Tensor, parameter: int) -> Tensor:
        """Divide all that a pass within the backward pass, or the pass of a compiled model, sends to a parameter."""
        is_scaled = self.is_compiled if self._pass is None else self._pass != backward_pass()
        if is_scaled:
            return gradient / self.loss_scale
        waiting = self._waiting.pop(parameter, None)
        return gradient if waiting is None else gradient + waiting

    def _follow_parameters(self) -> None:
        """Hook the parameters that were thawed or made since: their gradients would keep the loss scale."""
        present = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        known = set(map(id, self.parameters))
        self._hook([parameter for parameter in present if id(parameter) not in known])
        frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]  # they keep their hook
        self.parameters = present + frozen

    def _hook(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.register_hook(partial(self._unscale_whole, parameter=id(parameter)))

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


def _edges_to_leaves(ends: list[Node], scaling: LossScaling) -> Iterator[tuple[Node, dict[int, Tensor]]]:
    """Yield each node of the model's graph that sends gradients to leaves, with these by the number of the edge, once.

    ends: of the model's outputs. What lies before the model's inputs is left out.
    """
    seen, waiting = set(ends), list(ends)
    while waiting:
        node = waiting.pop()
        if getattr(node, "begins", None) is scaling:
            continue
        to_leaves: dict[int, Tensor] = {}
        for number, (following, _) in enumerate(node.next_functions):
            if following is not None and not following.next_functions and hasattr(following, "variable"):
                to_leaves[number] = following.variable
            elif following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
        noted: Any = node.metadata
        if to_leaves and _IS_UNSCALED not in noted:  # a result of an earlier pass may lie within
            noted[_IS_UNSCALED] = True
            yield node, to_leaves


def _scale_gradients(tensors: Any, factor: Tensor, enter: Any = None, model: LossScaling | None = None) -> Any:
    """The tensors of a tree, with their gradients multiplied where they have any.

    enter: is called when a gradient arrives. model: begins here.
    """

    def scale(tensor: Tensor) -> Tensor:
        return _ScaleGradient.apply(tensor, factor, enter, model) if tensor.requires_grad else tensor

    return tree_map_only(Tensor, scale, tensors)


class _ScaleGradient(torch.autograd.Function):
    """The identity; it multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss_scale: Tensor, enter: Any, begins: LossScaling | None) -> Tensor:
        ctx.save_for_backward(loss_scale)
        ctx.enter, ctx.begins = enter, begins
        return output.clone() if output.dim() == 0 else output.view_as(output)  # a loss may be scaled in place, a view may not

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        (loss_scale,) = ctx.saved_tensors
        if ctx.enter is not None:
            ctx.enter()
        return grad_output * loss_scale, None, None, None

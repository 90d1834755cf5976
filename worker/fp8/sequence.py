"""Sequences in which an FP8 layer computes the activation right before it, so that what the activation returns is not kept.

It does so only while the whole sequence runs and nobody looks in between. The activation stays in its place: called by
itself, in a slice, or with hooks on it or on the layer, each computes what it always did, to the same bits.
"""

from collections import Counter
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from octet.worker.common.wrap import Nesting, Wrapper, wrap
from octet.worker.fp8.linear import Float8Linear

_GLOBAL_HOOKS = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


class SequenceForward(Wrapper):
    """Takes the place of the `forward` of one sequence: layers apply the activations before them."""

    nesting = Nesting.LAYER

    def __call__(self, input: Tensor) -> Tensor:
        modules, position = list(self.module._modules.values()), 0
        while position < len(modules):
            layer = modules[position + 1] if position + 1 < len(modules) else None
            module: Any = modules[position]
            if isinstance(layer, Float8Linear) and _is_unobserved(module, layer):
                input = layer(input, takes_over_activation=True)
                position += 2
            else:
                input = module(input)
                position += 1
        return input


def take_over_activations(model: nn.Module) -> None:
    """In each nn.Sequential, let a layer in FP8 compute the activation that comes right before it."""
    users = Counter(id(child) for owner in model.modules() for child in owner._modules.values())
    for owner in list(model.modules()):
        if type(owner).forward is not nn.Sequential.forward or "forward" in vars(owner):
            continue
        takes_over = False
        for activation, layer in pairwise(owner._modules.values()):
            known = name_of_activation(activation) if activation is not None and not _has_hooks(activation) else None
            if known and isinstance(layer, Float8Linear) and users[id(activation)] == users[id(layer)] == 1:
                layer.activation, takes_over = known, True
        if takes_over:
            wrap(owner, SequenceForward())


def name_of_activation(module: nn.Module) -> str | None:
    """The name of a module among kernels' ACTIVATIONS."""
    if type(module) is nn.GELU:
        return "gelu-tanh" if module.approximate == "tanh" else "gelu"
    if type(module) in (nn.ReLU, nn.SiLU) and not module.inplace:
        return "relu" if isinstance(module, nn.ReLU) else "silu"
    return None


def _is_unobserved(activation: nn.Module, layer: Float8Linear) -> bool:
    """Return True if the layer is to compute this activation, and no hook reads the tensor between the two."""
    is_known = layer.activation is not None and name_of_activation(activation) == layer.activation
    return is_known and not (is_observed(activation) or _has_hooks(layer))


def is_observed(module: nn.Module) -> bool:
    """Return True if a hook may read the inputs or outputs of a module."""
    return _has_hooks(module) or _any_observes(_GLOBAL_HOOKS)


def _has_hooks(module: nn.Module) -> bool:
    return _any_observes((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _any_observes(kinds: tuple[dict[int, Any], ...]) -> bool:
    """Return True if there is a hook other than those that declare `reads_no_tensors = True`."""
    if not any(kinds):
        return False
    return any(not getattr(hook, "reads_no_tensors", False) for hooks in kinds for hook in hooks.values())

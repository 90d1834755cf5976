"""Activations between FP8 layers: one kernel writes what they return with its amax, and one their gradients with theirs.

An activation, or a gate (SwiGLU: silu(gate) * up), gives its amax to the layer after it (`handoff.py`) and those of its
gradients to the layers before it (`handoff.py`), so that each of them reads what it quantizes once; with delayed
scaling it writes codes of them all. Modules keep their class, parameters and hooks; only their `forward` is another. It acts on
an accelerator, eagerly, where no hook looks between; else they run as they are: in a compiled graph the compiler does the same
(`handoff.py`), and where activations are kept in FP8 it keeps what eager code keeps (`ActivateInGraph`). What layers of an
`nn.Sequential` compute before they quantize is not written at all (`sequence.py`).
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from octet.api_schemas.models import families_with
from octet.api_schemas.models.architectures import GATED_MLP_CLASSES
from octet.worker import kernels
from octet.worker.common.wrap import Nesting, Wrapper, wrap, wrapper_of
from octet.worker.fp8.accelerator import is_accelerator
from octet.worker.fp8.gradient_hooks import once_differentiable
from octet.worker.fp8.handoff import Handoff, Recorded, attach, gradient_handoff_of, write_gradients
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.operand import OperandScaling
from octet.worker.fp8.recipe import ALL_GEMMS
from octet.worker.fp8.sequence import SequenceForward, is_observed, name_of_activation

TRANSFORMERS = "transformers.activations"


class Parts(NamedTuple):
    """Names of the parts of an MLP that computes down(activation(gate(x)) * up(x)).

    activation: a module; or, where the MLP's own code calls torch's, one of kernels' ACTIVATIONS.
    """

    gate: str
    up: str
    down: str
    activation: str


_OF_OURS = Parts("gate", "up", "down", "silu")
_OF_TRANSFORMERS = Parts("gate_proj", "up_proj", "down_proj", "act_fn")
GATED_MLPS: dict[tuple[str, str], Parts] = {
    **{(f"octet.worker.models.{family}", "MLP"): _OF_OURS for family in families_with("gated_mlp")},
    **{(f"transformers.models.{name}.modeling_{name}", mlp): _OF_TRANSFORMERS for name, mlp in GATED_MLP_CLASSES.items()},
}
"""By module and name of the class, which is recognised without importing it. Subclasses may compute something else."""


class GatedForward(Wrapper):
    """Takes the place of the `forward` of one gated MLP."""

    nesting = Nesting.LAYER
    saves_in_fp8 = False
    """True if the activations that wait for the backward pass are rounded, so that a graph has to keep the same ones."""

    def __init__(self, mlp: nn.Module, parts: Parts) -> None:
        self.mlp, self.parts = mlp, parts

    def __call__(self, x: Tensor) -> Tensor:
        activation = self._activation(x)
        if activation is None:
            return type(self.mlp).forward(self.mlp, x)
        mlp: Any = self.mlp
        gate, up = getattr(mlp, self.parts.gate)(x), getattr(mlp, self.parts.up)(x)
        if gate.shape == up.shape and gate.dtype == up.dtype:
            gated = activated(gate, up, activation, self._consumer())
        else:
            gated = kernels.ACTIVATIONS[activation].forward(gate) * up
        output: Tensor = getattr(mlp, self.parts.down)(gated)
        return output

    def _consumer(self) -> OperandScaling | None:
        down = getattr(self.mlp, self.parts.down)
        return down.input_scaling if isinstance(down, Float8Linear) and down.high_precision != ALL_GEMMS else None

    def _activation(self, x: Tensor) -> str | None:
        """The activation of kernels' ACTIVATIONS that gates; None where the MLP has to run as it is."""
        if not _acts(self, x):
            return None
        if self.parts.activation in kernels.ACTIVATIONS:
            return self.parts.activation
        module = getattr(self.mlp, self.parts.activation)
        return None if is_observed(module) else known_activation(module)


class ActivationForward(Wrapper):
    """Takes the place of the `forward` of one activation module."""

    nesting = Nesting.LAYER
    saves_in_fp8 = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> Tensor:
        activation = known_activation(self.module)
        if activation is None or not _acts(self, input):
            return type(self.module).forward(self.module, input)
        return activated(input, None, activation)


class Activate(torch.autograd.Function):
    """An activation of x, times what it gates, and its amax. It keeps both for the backward pass, and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gated: Tensor | None, activation: str, known_scale: kernels.KnownScale | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        found = kernels.activate(x, activation, gated, known_scale=known_scale)
        ctx.save_for_backward(x, gated)
        ctx.activation = activation
        ctx.handoffs = gradient_handoff_of(x), None if gated is None else gradient_handoff_of(gated)
        ctx.mark_non_differentiable(found.amax, *(() if found.codes is None else (found.codes,)))
        ctx.set_materialize_grads(False)  # a launch for the amax, which has no gradient
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
        x, gated = ctx.saved_tensors
        gradients = write_gradients(grad, x, ctx.activation, gated, ctx.handoffs)
        return gradients[0], None if gated is None else gradients[1], None, None


class ActivateInGraph(torch.autograd.Function):
    """`Activate` in a graph of torch.compile: ops of torch, which the compiler joins to those before and behind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gated: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(x, gated)
        ctx.activation = activation
        output = kernels.ACTIVATIONS[activation].forward(x)
        return output if gated is None else output * gated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gated = ctx.saved_tensors
        forward, backward = kernels.ACTIVATIONS[ctx.activation]
        if gated is None:
            return backward(grad, x), None, None
        return backward(grad * gated, x), grad * forward(x), None


def _acts(forward: "GatedForward | ActivationForward", x: Tensor) -> bool:
    """Return True where a module does not run as it is."""
    return is_accelerator(x.device) and (forward.saves_in_fp8 or not torch.compiler.is_compiling())


def activated(x: Tensor, gated: Tensor | None, activation: str, consumer: OperandScaling | None = None) -> Tensor:
    """An activation of x, times what it gates, that carries its amax. consumer: of the layer after it, if it is known."""
    if torch.compiler.is_compiling():
        in_graph: Tensor = ActivateInGraph.apply(x, gated, activation)
        return in_graph
    handoff = Handoff(consumer)
    known_scale = handoff.known_scale()
    output, amax, codes = Activate.apply(x, gated, activation, known_scale)
    handoff.record(Recorded(amax, codes, known_scale))
    return attach(output, handoff)


def known_activation(module: nn.Module) -> str | None:
    """The name among kernels' ACTIVATIONS of a module of torch, or of transformers where it calls torch's function."""
    kind = (type(module).__module__, type(module).__name__)
    act = getattr(module, "act", None)
    if kind == (TRANSFORMERS, "SiLUActivation"):
        return "silu"
    if kind == (TRANSFORMERS, "GELUActivation"):
        return "gelu" if act is functional.gelu else None
    if kind == (TRANSFORMERS, "GELUTanh") and isinstance(act, partial):
        return "gelu-tanh" if act.func is functional.gelu and act.keywords == {"approximate": "tanh"} else None
    return name_of_activation(module)


def carry_activations(model: nn.Module) -> int:
    """Let known gated MLPs, and activations beside an FP8 layer, give their amaxes to FP8 layers. Returns their number."""
    found = list(_forwards(model))
    for module, forward in found:
        wrap(module, forward)
        if isinstance(forward, GatedForward):
            gate, up, down = (getattr(module, name) for name in forward.parts[:3])
            _write_in_graph(before=(gate, up), after=down)
    for sequence in model.modules():
        if wrapper_of(sequence, SequenceForward) is not None:
            for layer, activation in pairwise(sequence._modules.values()):
                if layer is not None and activation is not None and name_of_activation(activation) is not None:
                    _write_in_graph(before=(layer,))
    return len(found)


def _write_in_graph(before: Iterable[nn.Module], after: nn.Module | None = None) -> None:
    """Let compiled graphs write codes of an activation, and of its gradients, for the layers around it."""
    for layer in before:
        if isinstance(layer, Float8Linear):
            layer.grad_output_scaling.is_written_in_graph = True
    if isinstance(after, Float8Linear):
        after.input_scaling.is_written_in_graph = True


def _forwards(model: nn.Module) -> Iterator[tuple[nn.Module, GatedForward | ActivationForward]]:
    for owner in model.modules():
        parts = GATED_MLPS.get((type(owner).__module__, type(owner).__name__))
        if "forward" in vars(owner) or isinstance(owner, nn.Sequential):
            continue
        if parts is not None:
            if isinstance(getattr(owner, parts.down), Float8Linear):
                yield owner, GatedForward(owner, parts)
        elif any(isinstance(child, Float8Linear) for child in owner.children()):
            for child in owner.children():
                if known_activation(child) is not None and "forward" not in vars(child):
                    yield child, ActivationForward(child)

"""Norms in front of FP8 layers: attach to their output its amax, found while normalizing, and a place for its codes.

The layers after a norm then read its output once, instead of twice, and quantize it once for all of
them (`handoff.py`). A norm keeps its class, parameters and hooks; only its `forward` is replaced.
On an accelerator LayerNorm and RMSNorm (torch's, `HalfNorm`, and those that `norms.py` recognizes
by what they compute) run as one kernel that also finds the amax. Other norms, and all norms on a
CPU, run unchanged, and their output gets only the place for codes. So do norms in a compiled graph:
there the compiler joins a norm to the addition before it, and the amax, or codes, to both
(`handoff.py`). Where the residual stream is in bf16 (`residual_stream.py`), norms return bf16 for
bf16, and run as one kernel on a CPU too.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octet.api_schemas.models import families_with
from octet.api_schemas.models.architectures import PURE_BLOCK_CLASSES
from octet.worker import kernels
from octet.worker.common.wrap import Nesting, Wrapper, wrap, wrapper_of
from octet.worker.fp8.accelerator import is_accelerator
from octet.worker.fp8.gradient_hooks import once_differentiable
from octet.worker.fp8.handoff import Handoff, NextConsumer, Recorded, attach, attach_place
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.norms import HalfNorm, eps_of, is_norm, why_kept
from octet.worker.kernels.normalization import MOST_FEATURES
from octet.worker.kernels.reference import normalize_rows

PURE_BLOCKS = frozenset(
    {
        *((f"octet.worker.models.{family}", "Block") for family in families_with("pure_blocks")),
        *((f"transformers.models.{name}.modeling_{name}", block) for name, block in PURE_BLOCK_CLASSES.items()),
    }
)
"""Module and name of classes that change no norm's output in place; a compiled graph cannot check it (`handoff.py`)."""


class NormForward(Wrapper):
    """Takes the place of one norm's `forward`."""

    nesting = Nesting.LAYER
    saves_in_fp8 = False
    """True if what waits for the backward pass is rounded, so that a graph has to keep the same as eager code does."""

    def __init__(self, norm: nn.Module, *, is_pure: bool) -> None:
        """is_pure: nothing changes the norm's output in place, so it may have a handoff in a compiled graph."""
        self.norm, self.is_pure, self.returns_dtype_of_input = norm, is_pure, False
        self.is_fused = isinstance(norm, HalfNorm) or why_kept(norm) is None
        self.is_layer_norm = getattr(norm, "is_layer_norm", type(norm) is nn.LayerNorm)
        self.eps = eps_of(norm)
        self.next_consumer: NextConsumer | None = NextConsumer()
        """None where the norm does not write codes: a pass that is checkpointed selectively issues the same ops each time."""

    def __call__(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            output = self._in_graph(input)
            return attach_place(output) if self.is_pure else output
        runs_fused = self._runs_fused(input)
        weight: Any = self.norm.weight if runs_fused else None
        dtype = self._output_dtype(input, weight) if runs_fused else None
        if dtype is None:
            return attach_place(self._as_it_is(input))
        bias = self.norm._parameters.get("bias")
        following, consumer = self.next_consumer, None
        if following is not None:
            consumer, following.scaling = following.scaling, None  # the layer sets it again if it takes codes
        handoff, found = Handoff(consumer, following), list[kernels.Normalized]()
        known_scale = handoff.known_scale()
        settings = Pass(self.is_layer_norm, dtype, known_scale, found)
        output = Normalize.apply(input, weight, bias, self.eps, settings)
        handoff.record(Recorded(found[0].amax, found[0].codes, known_scale))
        return attach(output, handoff)

    def _in_graph(self, input: Tensor) -> Tensor:
        """Return what eager code returns. With a bf16 stream, or activations in FP8, both save the input alone.

        torch's own function saves an fp32 copy of a bf16 input, and on a CPU more than the input, which would be rounded.
        """
        keeps_input = self._runs_fused(input) and (self.saves_in_fp8 or self._keeps_bf16(input))
        weight: Any = self.norm.weight if keeps_input else None
        dtype = self._output_dtype(input, weight) if keeps_input else None
        if dtype is None:
            return self._as_it_is(input)
        bias = self.norm._parameters.get("bias")
        output: Tensor = NormalizeInGraph.apply(input, weight, bias, self.eps, self.is_layer_norm, dtype)
        return output

    def _as_it_is(self, input: Tensor) -> Tensor:
        output: Tensor = type(self.norm).forward(self.norm, input)
        return output.to(input.dtype) if self._keeps_bf16(input) else output

    def _runs_fused(self, input: Tensor) -> bool:
        return self.is_fused and (is_accelerator(input.device) or self._keeps_bf16(input))

    def _keeps_bf16(self, input: Tensor) -> bool:
        return self.returns_dtype_of_input and input.dtype == torch.bfloat16

    def _output_dtype(self, input: Tensor, weight: Tensor) -> torch.dtype | None:
        """The dtype that the norm's own forward returns; None where it is the one to compute it."""
        is_known = self.eps is not None and weight.shape == input.shape[-1:] and input.shape[-1] <= MOST_FEATURES
        if not is_known or not input.numel():
            return None
        if isinstance(self.norm, HalfNorm) or self._keeps_bf16(input):
            return torch.bfloat16
        if weight.dtype != torch.float32:
            return None
        is_torchs = type(self.norm) in (nn.LayerNorm, nn.RMSNorm)
        in_autocast = is_torchs and torch.is_autocast_enabled(input.device.type)  # which runs torch's norms in fp32
        return torch.float32 if in_autocast or input.dtype == torch.float32 else None


class Pass(NamedTuple):
    """The keyword arguments of `kernels.normalize`. found: gets its result, with what autograd does not follow."""

    is_layer_norm: bool
    dtype: torch.dtype
    known_scale: kernels.KnownScale | None
    found: list[kernels.Normalized]


class Normalize(torch.autograd.Function):
    """A norm over the last dimension. It saves its input and the statistics of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, settings: Pass) -> Tensor:
        is_layer_norm, dtype, known_scale, results = settings
        found = kernels.normalize(x, weight, bias, eps, is_layer_norm=is_layer_norm, dtype=dtype, known_scale=known_scale)
        results.append(found)
        ctx.save_for_backward(x, weight, bias, found.mean, found.rstd)
        return found.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        is_cast = torch.is_autocast_enabled(x.device.type)
        with torch.autocast(x.device.type, enabled=False) if is_cast else nullcontext():
            gradients = kernels.normalize_backward(grad, x, weight, bias, (mean, rstd))
        return *gradients, None, None


class NormalizeInGraph(torch.autograd.Function):
    """`Normalize` in a graph of torch.compile: ops of torch, which the compiler joins to those before and behind."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_layer_norm: bool, dtype: torch.dtype
    ) -> Tensor:
        output, *statistics = normalize_rows(x, weight, bias, eps, is_layer_norm, dtype)
        mean = statistics[0] if is_layer_norm else None
        ctx.save_for_backward(x, weight, bias, mean, statistics[-1])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            gradients = kernels.normalize_backward(grad, x, weight, bias, (mean, rstd))
        return *gradients, None, None, None


def carry_norms(model: nn.Module) -> int:
    """Let the norms that stand before FP8 layers return what carries codes. Returns their number.

    A norm stands before them if the module that owns it holds an FP8 layer of as many inputs as the norm has features, and no
    list of blocks: these have norms of their own. Where no layer gets the norm's output, nothing but the amax was in vain.
    """
    found = list(_norms_before_layers(model))
    for norm, is_pure in found:
        wrap(norm, NormForward(norm, is_pure=is_pure))
    return len(found)


def return_dtype_of_input(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Let the norms of a model that are given bf16 return bf16: LayerNorms, RMSNorms, and whatever norms blocks have."""
    of_blocks = {part for block in blocks for part in block.modules()}
    for norm in model.modules():
        forward = wrapper_of(norm, NormForward)
        if forward is None:
            if not is_norm(norm) or "forward" in vars(norm):
                continue
            forward = NormForward(norm, is_pure=False)
            if not forward.is_fused and norm not in of_blocks:
                continue
            wrap(norm, forward)
        forward.returns_dtype_of_input = True


def _norms_before_layers(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    for owner in model.modules():
        if isinstance(owner, nn.ModuleList) or any(isinstance(child, nn.ModuleList) for child in owner.children()):
            continue
        norms = [child for child in owner.children() if is_norm(child) and "forward" not in vars(child)]
        widths = {part.in_features for part in owner.modules() if isinstance(part, Float8Linear)} if norms else set()
        is_pure = (type(owner).__module__, type(owner).__name__) in PURE_BLOCKS
        for norm in norms:
            weight = getattr(norm, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 1 and weight.shape[0] in widths:
                yield norm, is_pure

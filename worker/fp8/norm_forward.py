"""Norms in front of FP8 layers: what they return carries its amax, found in the pass that normalizes, and a place for codes.

The layers after a norm then read its output once, instead of twice, and quantize it once for all of them (`carried.py`). A norm
keeps its class, parameters and hooks; only its `forward` is another. On an accelerator LayerNorm and RMSNorm (torch's,
`HalfNorm`, and those that `norms.py` knows by what they compute) run as one kernel with the amax. Other norms, and all on a
CPU, run as they are, and their output carries the place for codes alone; so do norms in a compiled graph, where the compiler
joins a norm to the addition before it and the amax, or codes, to both (`in_graph.py`). Where the residual stream is in bf16
(`residual_stream.py`), norms return bf16 for bf16, and run as one kernel on a CPU too.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from worker import kernels
from worker.fp8.accelerator import is_accelerator
from worker.fp8.carried import Taker, Written, carry
from worker.fp8.gradient_hooks import once_differentiable
from worker.fp8.linear import Float8Linear
from worker.fp8.norms import HalfNorm, eps_of, is_norm, why_kept
from worker.fp8.shapes import shaped
from worker.fp8.usual import parameter_of
from worker.kernels.normalization import MOST_FEATURES

PURE_BLOCKS = frozenset(
    {
        ("worker.models.gpt", "Block"),
        ("worker.models.llama", "Block"),
        ("transformers.models.gpt2.modeling_gpt2", "GPT2Block"),
        ("transformers.models.vit.modeling_vit", "ViTLayer"),
        *((f"transformers.models.{name}.modeling_{name}", f"{name.capitalize()}DecoderLayer") for name in ("llama", "mistral")),
        *((f"transformers.models.{name}.modeling_{name}", f"{name.capitalize()}DecoderLayer") for name in ("qwen2", "qwen3")),
    }
)
"""Module and name of classes that change no norm's output in place, which nobody can ask in a compiled graph (`carried.py`)."""


class NormForward:
    """Takes the place of one norm's `forward`."""

    def __init__(self, norm: nn.Module, *, is_pure: bool) -> None:
        """is_pure: nothing changes the norm's output in place, so it may carry something within a compiled graph."""
        self.norm, self.is_pure, self.returns_dtype_of_input = norm, is_pure, False
        self.is_fused = isinstance(norm, HalfNorm) or why_kept(norm) is None
        self.is_layer_norm = getattr(norm, "is_layer_norm", type(norm) is nn.LayerNorm)
        self.eps = eps_of(norm)
        self.taker: Taker | None = Taker()
        """None where the norm does not write codes: a pass that is checkpointed selectively issues the same ops each time."""

    def __call__(self, input: Tensor) -> Tensor:
        is_compiling = torch.compiler.is_compiling()
        if is_compiling and not self.is_pure:
            return self._as_it_is(input)
        runs_fused = not is_compiling and self.is_fused and (is_accelerator(input.device) or self._keeps_bf16(input))
        weight: Any = parameter_of(self.norm, "weight") if runs_fused else None
        dtype = self._output_dtype(input, weight) if runs_fused else None
        if dtype is None:
            return carry(self._as_it_is(input), None)
        bias = self.norm._parameters.get("bias")
        scaling = None
        if self.taker is not None:
            scaling, self.taker.scaling = self.taker.scaling, None  # the layer sets it again if it takes codes
        ahead = None if scaling is None else scaling.ahead()
        found: list[kernels.Normalized] = []
        apply = Normalize.apply if torch._C._are_functorch_transforms_active() else _apply
        output: Tensor = apply(input, weight, bias, self.eps, Pass(self.is_layer_norm, dtype, ahead, found))
        return carry(output, found[0].amax, Written.of(scaling, found[0].codes, ahead), self.taker)

    def _as_it_is(self, input: Tensor) -> Tensor:
        output: Tensor = type(self.norm).forward(self.norm, input)
        return output.to(input.dtype) if self._keeps_bf16(input) else output

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
    ahead: kernels.Ahead | None
    found: list[kernels.Normalized]


class Normalize(torch.autograd.Function):
    """A norm of the last dimension. It keeps the input as it came, and the rows' statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, how: Pass) -> Tensor:
        is_layer_norm, dtype, ahead, results = how
        shape = x.shape
        x_MN = x if len(shape) == 2 else x.reshape(-1, shape[-1])
        found = kernels.normalize(x_MN, weight, bias, eps, is_layer_norm=is_layer_norm, dtype=dtype, ahead=ahead)
        results.append(found)
        ctx.save_for_backward(x, weight, bias, found.mean, found.rstd)
        return shaped(found.output, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        shape, is_cast = x.shape, torch.is_autocast_enabled(x.device.type)
        grad_MN, x_MN = (grad, x) if len(shape) == 2 else (grad.reshape(-1, shape[-1]), x.reshape(-1, shape[-1]))
        with torch.autocast(x.device.type, enabled=False) if is_cast else nullcontext():
            grad_x, *others = kernels.normalize_backward(grad_MN, x_MN, weight, bias, (mean, rstd))
        return grad_x if len(shape) == 2 else grad_x.view(shape), *others, None, None


_apply = super(torch.autograd.Function, Normalize).apply
"""As in `usual.py`."""


def carry_norms(model: nn.Module) -> int:
    """Let the norms that stand before FP8 layers return what carries codes. Returns their number.

    A norm stands before them if the module that owns it holds an FP8 layer of as many inputs as the norm has features, and no
    list of blocks: these have norms of their own. Where no layer gets the norm's output, nothing but the amax was in vain.
    """
    found = list(_norms_before_layers(model))
    for norm, is_pure in found:
        norm.forward = NormForward(norm, is_pure=is_pure).__call__
    return len(found)


def return_dtype_of_input(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Let the norms of a model that are given bf16 return bf16: LayerNorms, RMSNorms, and whatever norms blocks have."""
    of_blocks = {part for block in blocks for part in block.modules()}
    for norm in model.modules():
        forward: Any = getattr(vars(norm).get("forward"), "__self__", None)
        if not isinstance(forward, NormForward):
            if not is_norm(norm) or "forward" in vars(norm):
                continue
            forward = NormForward(norm, is_pure=False)
            if not forward.is_fused and norm not in of_blocks:
                continue
            norm.forward = forward.__call__
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

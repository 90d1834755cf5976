"""Has `torch.nn.utils.clip_grad_norm_` clip FP8 gradients in three launches, by what torch hands back. Nothing is patched.

`torch._foreach_norm` of FP8 gradients (`gradient_ops.norms_of`) finds the norm of all with the norms of each, in two launches.
It returns tensors of a class that remembers that they belong together. torch stacks them and takes the norm, which is known,
and makes a factor of it, which waits as a `ClipFactor` until `torch._foreach_mul_` takes it: the third launch.
Any other use of a tensor makes it an ordinary one, for good, and a factor is then computed by torch's formula. The norm that
`clip_grad_norm_` returns is an ordinary tensor; that of `get_total_norm` becomes one when somebody reads it.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from worker import kernels
from worker.fp8.clipping import codes_of, note_writes, scales_of
from worker.fp8.gradient import Float8Gradient

_EPSILON = 1e-6  # torch's
_METADATA = frozenset(
    (
        *(Tensor.numel, Tensor.dim, Tensor.size, Tensor.stride),
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "nbytes")),
    )
)
"""Reads that see no value."""
_TRACERS = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL)


def takes_part(gradient: Tensor) -> bool:
    """Whether one launch takes such a gradient together with those in FP8: it is one, or in fp32 and no other subclass."""
    return isinstance(gradient, Float8Gradient) or (
        gradient.dtype == torch.float32 and gradient.layout == torch.strided and not hasattr(gradient, "__tensor_flatten__")
    )


def known_norms(gradients: Sequence[Tensor], norms_N: Tensor, again_N1: Tensor, total: Tensor, order: float) -> list[Tensor]:
    """Return the norms of N gradients, fp32 (). norms_N, again_N1, total: as `kernels.norms` returns them."""
    norms = list(norms_N.unbind())
    if not _is_recorded(total.device) and not (torch.is_grad_enabled() and any(each.requires_grad for each in gradients)):
        found = Found(again_N1, total, order)
        for number, norm in enumerate(norms):
            _mark(norm, Norm, found, number)
    return norms


def _is_recorded(device: torch.device) -> bool:
    """Whether a tracer, a transform or a CUDA graph records ops, and would miss one that waits."""
    return (
        _is_traced()
        or torch.is_inference_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def _is_traced() -> bool:
    """Whether a compiler or another tracer makes a program of the ops."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or any(torch._C._get_dispatch_mode(tracer) is not None for tracer in _TRACERS)
    )


class Found:
    """What one op has found of a list of N gradients. stack (N,), total (): to be given to the user, once."""

    def __init__(self, again_N1: Tensor, total: Tensor, order: float) -> None:
        self.stack: Tensor | None = again_N1[:-1]
        self.total: Tensor | None = total
        self.copy, self.order, self.num_norms = again_N1[-1], order, len(again_N1) - 1

    def has(self, norms: Any) -> bool:
        """Whether these are all the norms in their order, unchanged."""
        places = [(norm.found, norm.number, norm._version) if isinstance(norm, Norm) else None for norm in norms]
        return places == [(self, number, 0) for number in range(self.num_norms)]


class _Known(Tensor):
    """A tensor that holds its values, and of which more is known until it is used in another way than torch's clipping does."""

    plain: type[Tensor]
    """Its class from then on."""
    found: Found
    number: int

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a function's result if it is known, else NotImplemented. Functions treat all tensors here as plain ones."""
        raise NotImplementedError

    def unmark(self) -> None:
        """Become an ordinary tensor."""
        self.__class__ = self.plain  # type: ignore[assignment]
        del self.found, self.number

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():  # what a compiler records reads the values
                return func(*args, **kwargs)
        known = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Known)]
        with torch._C.DisableTorchFunctionSubclass():
            result = known[0].answer(func, args, kwargs) if known and func not in _METADATA else func(*args, **kwargs)
            if result is not NotImplemented:
                return result
            for tensor in {id(tensor): tensor for tensor in known}.values():
                tensor.unmark()
        return func(*args, **kwargs)


@cache
def _marked(kind: type[_Known], plain: type[Tensor]) -> type[_Known]:
    return type(kind.__name__, (kind, plain), {"plain": plain})


def _mark(tensor: Tensor, kind: type[_Known], found: Found, number: int = 0) -> Tensor:
    """Change a tensor's class in place, as torch does with a parameter that is initialized late."""
    tensor.__class__ = _marked(kind, type(tensor))
    tensor.found, tensor.number = found, number
    return tensor


class Norm(_Known):
    """The norm of one gradient: `number` of those that were found together."""

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer what moves it to its own device, and what stacks all."""
        if func == Tensor.to and args[1:] == (self.device,) and not kwargs:
            return self
        found = self.found
        if func is not torch.stack or len(args) != 1 or kwargs or found.stack is None or not found.has(args[0]):
            return NotImplemented
        stack, found.stack = found.stack, None
        return _mark(stack, Stack, found)


class Stack(_Known):
    """All norms."""

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer with the norm of all, once."""
        found = self.found
        if func is not torch.linalg.vector_norm or args[1:] != (found.order,) or kwargs or self._version or found.total is None:
            return NotImplemented
        total, found.total = found.total, None
        return _mark(total, TotalNorm, found)


class TotalNorm(_Known):
    """The norm of all gradients."""

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer whether it is finite; torch's epsilon added to it is where a factor begins."""
        if func in (Tensor.isnan, Tensor.isinf):
            return func(*args, **kwargs)
        adds_epsilon = func == Tensor.add and len(args) == 2 and _is(args[1], _EPSILON) and not kwargs
        if not adds_epsilon or self._version or _is_recorded(self.device):
            return NotImplemented
        return ClipFactor(self, self.found.copy)


def _is(argument: Any, number: float) -> bool:
    return type(argument) is float and argument == number


class ClipFactor(Tensor):
    """min(max_norm / (norm + 1e-6), 1), fp32 (), or what torch computes on the way; computed when somebody reads or writes it.

    total: the user's norm. copy: of it, which is read when the other is not the same any more.
    """

    def __new__(cls, total: Tensor, copy: Tensor, max_norm: float | None = None, is_clamped: bool = False) -> "ClipFactor":
        return Tensor._make_wrapper_subclass(cls, (), dtype=torch.float32, device=total.device)

    def __init__(self, total: Tensor, copy: Tensor, max_norm: float | None = None, is_clamped: bool = False) -> None:
        self._total, self._copy, self._max_norm, self._is_clamped = total, copy, max_norm, is_clamped
        self._computed: Tensor | None = None

    def _norm(self) -> Tensor:
        """The norm as it was: the user's as long as nobody has touched it."""
        total = self._total
        with torch._C.DisableTorchFunctionSubclass():
            if not isinstance(total, TotalNorm) or total._version:
                return self._copy
            total.unmark()
        return total

    def _values(self) -> Tensor:
        """Compute it by torch's ops, once; from then on this is the tensor."""
        if self._computed is None:
            with torch.inference_mode(False):
                values = self._norm() + _EPSILON
                values = values if self._max_norm is None else self._max_norm / values
                self._computed = torch.clamp(values, max=1.0) if self._is_clamped else values
        return self._computed

    def _next(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What follows in torch's clipping, if it is this: a factor that waits, or the gradients' clipping."""
        if func in _METADATA:
            return func(*args, **kwargs)
        if _is_recorded(self.device):
            return NotImplemented
        if func == Tensor.to and args[1:] == (self.device,) and not kwargs:
            return self
        if func is Tensor.__rdiv__ and self._max_norm is None and type(args[1]) is float:
            return ClipFactor(self._total, self._copy, args[1])
        is_clamp = func is torch.clamp and args == (self,) and [*kwargs] == ["max"] and _is(kwargs["max"], 1.0)
        if is_clamp and self._max_norm is not None and not self._is_clamped:
            return ClipFactor(self._total, self._copy, self._max_norm, is_clamped=True)
        if func is torch._foreach_mul_ and self._is_clamped and not kwargs and args[1] is self and self._can_clip(args[0]):
            kernels.clip_(codes_of(args[0]), scales_of(args[0]), self._norm(), self._max_norm)
            note_writes(args[0])
            return ()
        return NotImplemented

    def _can_clip(self, gradients: Any) -> bool:
        """Whether one launch can multiply these."""
        return (
            any(isinstance(gradient, Float8Gradient) for gradient in gradients)
            and all(takes_part(gradient) and gradient.device == self.device for gradient in gradients)
            and not (torch.is_grad_enabled() and any(gradient.requires_grad for gradient in gradients))
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        factors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ClipFactor)]
        with torch._C.DisableTorchFunctionSubclass():
            waits = len(factors) == 1 and factors[0]._computed is None
            result = factors[0]._next(func, args, kwargs) if waits else NotImplemented
        return _with_values(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run what has not come by way of Python, such as ops of TorchScript."""
        return _with_values(func, args, kwargs or {})


def _with_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with factors' values; what it returns of them, as an op in place does, are the factors."""
    if _is_traced():
        raise NotImplementedError("A factor made of the norm of FP8 gradients is traced. Trace with `factor.clone()`.")
    owners: dict[int, ClipFactor] = {}

    def read(leaf: Any) -> Any:
        if not isinstance(leaf, ClipFactor):
            return leaf
        owners[id(leaf._values())] = leaf
        return leaf._values()

    result = func(*tree_map(read, args), **tree_map(read, kwargs))
    return tree_map(lambda leaf: owners.get(id(leaf), leaf), result)

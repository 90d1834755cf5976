"""Put wrappers in the place of modules' `forward`. Nothing else in the runtime assigns it.

A wrapper is called in the place of one module's `forward`, and calls what it stands for by `run`.
The wrappers of one module nest in the order of `Nesting`, whichever was put on first. They are part
of the module: copies and pickles of it have them.

This stands below the layers that wrap: fp8/ (autocast, norms, MLPs), prepare/ (checkpoints, saved
activations, heads) and parallel/ (shards).
"""

import inspect
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from types import CodeType
from typing import Any, ClassVar, TypeVar

from torch import nn


class Nesting(IntEnum):
    """The order in which the wrappers of one module nest, the outermost first."""

    AUTOCAST = 0
    CHECKPOINT = 1
    SAVING = 2
    TENSOR = 3
    LAYER = 4
    """Norms, MLPs, activations and heads: computes what the layer computes, in another way."""


class Wrapper:
    """Takes the place of one module's `forward`. Subclasses set `nesting` and define `__call__`."""

    nesting: ClassVar[Nesting]
    module: nn.Module
    """The module that is wrapped; set by `wrap`."""
    inner: Callable[..., Any] | None = None
    """The next wrapper, or what a user assigned; None stands for the forward of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call what the wrapper stands for."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the module's own forward, in which transformers finds input names."""
        if self.inner is None:
            return inspect.signature(type(self.module).forward.__get__(self.module))
        wrapper = getattr(self.inner, "__self__", None)
        return inspect.signature(wrapper if isinstance(wrapper, Wrapper) else self.inner)

    @property
    def __code__(self) -> CodeType:
        """The code of the module's own forward, by whose place torch.export names the sizes of inputs."""
        own: Any = type(self.module).forward if self.inner is None else self.inner
        code: CodeType = own.__code__
        return code


AnyWrapper = TypeVar("AnyWrapper", bound=Wrapper)


def wrap(module: nn.Module, wrapper: Wrapper, *, as_object: bool = False) -> None:
    """Put a wrapper among those of a module, at the place of its `nesting`; of two alike, outside.

    as_object: if the wrapper is the outermost, `forward` becomes the object, which has the
    signature of the module's own forward. Otherwise it becomes the object's method: torch.compile
    makes one graph for the methods of all objects of a class, but one for each object, and stops at
    eight.
    """
    present = wrappers_of(module)
    outer = [other for other in present if other.nesting < wrapper.nesting]
    wrapper.module = module
    if outer:
        wrapper.inner, outer[-1].inner = outer[-1].inner, wrapper.__call__
    else:
        replaced = vars(module).get("forward")
        wrapper.inner = present[0].__call__ if present else replaced
        module.forward = wrapper if as_object else wrapper.__call__


def unwrap(model: nn.Module) -> None:
    """Take all wrappers off a model: its modules have the forwards of before again.

    What a user put around a wrapper stays, with the wrapper inside. Hooks stay.
    """
    for module in model.modules():
        if present := wrappers_of(module):
            own = present[-1].inner
            if own is None:
                del module.forward
            else:
                module.forward = own


def wrappers_of(module: nn.Module) -> list[Wrapper]:
    """Return the wrappers of a module, the outermost first."""
    found: list[Wrapper] = []
    forward = vars(module).get("forward")
    while isinstance(wrapper := getattr(forward, "__self__", forward), Wrapper):
        found.append(wrapper)
        forward = wrapper.inner
    return found


def wrapper_of(module: nn.Module, kind: type[AnyWrapper]) -> AnyWrapper | None:
    """Return the wrapper of one kind that a module has; None where it has none."""
    return next((wrapper for wrapper in wrappers_of(module) if isinstance(wrapper, kind)), None)


def count_wrappers(model: nn.Module) -> dict[str, dict[str, int]]:
    """Count a model's wrapped modules: by the wrapper's class, outermost first, then by their own."""
    counts: dict[tuple[Nesting, str], Counter[str]] = {}
    for module in model.modules():
        for wrapper in wrappers_of(module):
            kinds = counts.setdefault((wrapper.nesting, type(wrapper).__name__), Counter())
            kinds[type(module).__name__] += 1
    return {name: dict(counts[nesting, name]) for nesting, name in sorted(counts)}

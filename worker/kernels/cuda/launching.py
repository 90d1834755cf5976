"""Launch a Triton kernel with little work of the host, once Triton has launched it for the same arguments.

Triton's own launch binds the arguments, finds out what it may specialize on in each, and looks the
compiled kernel up by a string made of that. Here the key is made of the arguments themselves: the
dtypes of aligned tensors, and the values of all other arguments. Triton itself launches what no key
describes: a float, a tensor of another class, an unaligned one, or any launch with a profiler's
hook.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor, nn
from triton.runtime import driver
from triton.runtime.jit import JITFunction

COMPILED: dict[tuple[Any, ...], tuple[Any, ...]] = {}
"""The launch, function and metadata of a kernel that Triton compiled, and Triton's driver.

The key is made of the launcher, the device, and the dtypes and values of the arguments.
"""
MOST_KNOWN = 4096
"""Kernels to remember; shapes that change in each step would fill the memory."""

_ALIGNMENT = 16  # bytes; what Triton specializes on
_TENSORS = frozenset((Tensor, nn.Parameter))
_VALUES = frozenset((int, bool, str, type(None)))
_FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of a tensor."""


def contiguous_layout(shape: tuple[int, ...]) -> Layout:
    """Return the sizes and strides of a contiguous tensor."""
    return shape, tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


class _Places:
    """The positions of tensors and of values among arguments of certain types. In a key it stands for launcher and types."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self.are_known = all(kind in _TENSORS or kind in _VALUES for kind in kinds)
        self.tensors_of = _getter([place for place, kind in enumerate(kinds) if kind in _TENSORS])
        self.values_of = _getter([place for place, kind in enumerate(kinds) if kind not in _TENSORS])


class Launcher:
    """Launches one kernel with fixed options of the compiler, such as `num_warps`."""

    def __init__(self, kernel: Any, *, reads_fp8: bool = False, **options: Any) -> None:
        """kernel: a function of triton.jit. reads_fp8: it reads FP8 codes as such; others are given them as uint8."""
        self.kernel, self.reads_fp8, self.options = kernel, reads_fp8, options
        self.is_compiled = isinstance(kernel, JITFunction)  # else the interpreter runs it
        self._places: dict[tuple[type, ...], _Places] = {}

    def __call__(self, num_programs: int, *arguments: Any) -> None:
        """Launch so many programs on the present stream of the first tensor's device.

        arguments: the kernel's, in its order; the first is a tensor.
        """
        if elsewhere := _elsewhere(arguments[0]):
            with elsewhere:
                self(num_programs, *arguments)
            return
        runtime = triton.knobs.runtime
        on_enter, on_exit = runtime.launch_enter_hook, runtime.launch_exit_hook
        key = self.key(arguments) if not on_enter.calls and not on_exit.calls else None
        compiled = None if key is None else COMPILED.get(key)
        if key is None or compiled is None:
            self._launch_by_triton(num_programs, arguments, key)
            return
        run, function, metadata, gpu = compiled
        run(num_programs, 1, 1, gpu.get_current_stream(key[1]), function, metadata, None, on_enter, on_exit, *arguments)

    def _launch_by_triton(self, num_programs: int, arguments: tuple[Any, ...], key: tuple[Any, ...] | None) -> None:
        if not self.reads_fp8:
            arguments = tuple(_as_integers(argument) for argument in arguments)
        compiled = self.kernel[(num_programs,)](*arguments, **self.options)
        if key is not None and compiled is not None:
            if len(COMPILED) >= MOST_KNOWN:
                COMPILED.clear()
            COMPILED[key] = compiled.run, compiled.function, compiled.packed_metadata, driver.active

    def key(self, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return a key of all that Triton may specialize on; None if only Triton can determine it."""
        kinds = tuple(map(type, arguments))
        places = self._places.get(kinds)
        if places is None:
            places = self._places[kinds] = _Places(kinds)
        if not places.are_known or not self.is_compiled:
            return None
        addresses, dtypes = 0, []
        for tensor in places.tensors_of(arguments):
            addresses |= tensor.data_ptr()
            dtypes.append(tensor.dtype)
        if addresses % _ALIGNMENT:
            return None
        return (places, arguments[0].get_device(), places.values_of(arguments), *dtypes)


class PreparedLaunch:
    """A launch with fixed numbers. Calls pass tensors alone, with the dtypes, and the Nones, of the first call."""

    def __init__(self, launcher: Launcher, num_programs: int, *values: Any, num_given: int) -> None:
        """values: the arguments of the kernel that follow its tensors.

        num_given: the leading tensors that may be unaligned: those of several elements that the
        caller did not allocate for the launch. A scalar is loaded alone, wherever it is.
        """
        self.launcher, self.num_programs, self.values, self.num_given = launcher, num_programs, values, num_given

    def __call__(self, *tensors: Any) -> None:
        """Launch on the present stream of the tensors' device. tensors: the kernel's first arguments."""
        runtime, first = triton.knobs.runtime, tensors[0]
        on_enter, on_exit = runtime.launch_enter_hook, runtime.launch_exit_hook
        device, addresses = first.get_device(), first.data_ptr()
        if self.num_given > 1:
            for tensor in tensors[1 : self.num_given]:
                if tensor is not None:
                    addresses |= tensor.data_ptr()
        compiled = COMPILED.get((self, device))
        is_seen = on_enter.calls or on_exit.calls
        if compiled is None or addresses % _ALIGNMENT or is_seen or compiled[-1].get_current_device() != device:
            self._launch_and_prepare(tensors, device)
            return
        run, function, metadata, gpu = compiled
        stream = gpu.get_current_stream(device)
        run(self.num_programs, 1, 1, stream, function, metadata, None, on_enter, on_exit, *tensors, *self.values)

    def _launch_and_prepare(self, tensors: tuple[Any, ...], device: int) -> None:
        """Let the launcher launch, and keep what it has found."""
        arguments = tensors + self.values
        self.launcher(self.num_programs, *arguments)
        if known := COMPILED.get(self.launcher.key(arguments) or ()):
            COMPILED[self, device] = known


def _elsewhere(first: Any) -> AbstractContextManager[None] | None:
    """Return a context that makes the first tensor's device the current one; None if it is already.

    torch's ops switch to the device of their tensors by themselves, and Triton does not.
    """
    index = first.get_device() if type(first) in _TENSORS else -1
    if index < 0 or index == driver.active.get_current_device():
        return None
    elsewhere: AbstractContextManager[None] = torch.cuda.device(index)
    return elsewhere


def _getter(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that takes the arguments at these places, always as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda arguments: tuple(arguments[place] for place in places)


def _as_integers(argument: Any) -> Any:
    """FP8 codes as uint8, which is how kernels read and write them; all else as it is."""
    return argument.view(torch.uint8) if isinstance(argument, Tensor) and argument.dtype in _FP8 else argument

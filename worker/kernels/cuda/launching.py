"""Launch a Triton kernel with little work of the host, once Triton has launched it for the same arguments.

Triton's own launch binds the arguments, asks of each what it may specialize on, and makes a string of the answers to look the
compiled kernel up. Here the key is the arguments themselves: dtypes of tensors that are aligned, and the values of all
else. What no key describes (a float, a tensor of another class, an unaligned one, a profiler's hook) goes through Triton.
"""

from typing import Any

import triton
from torch import Tensor, nn
from triton.runtime import driver
from triton.runtime.jit import JITFunction

COMPILED: dict[tuple[Any, ...], Any] = {}
"""By device, launcher and what the arguments are: the kernel that Triton compiled for them."""
MOST_KNOWN = 4096
"""Kernels to remember; shapes that change in each step would fill the memory."""

_ALIGNMENT = 16  # bytes; what Triton specializes on
_TENSORS = (Tensor, nn.Parameter)
_VALUES = frozenset((int, bool, str, type(None)))


class Launcher:
    """Launches one kernel with fixed options of the compiler, such as `num_warps`."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        """kernel: a function of triton.jit without `do_not_specialize`."""
        self.kernel, self.options = kernel, options
        self.is_compiled = isinstance(kernel, JITFunction)  # else the interpreter runs it

    def __call__(self, num_programs: int, *arguments: Any) -> None:
        """Launch so many programs on the present device and stream. arguments: all of the kernel's, in its order."""
        key = self._key(arguments) if self.is_compiled else None
        compiled = None if key is None else COMPILED.get(key)
        if key is None or compiled is None:
            compiled = self.kernel[(num_programs,)](*arguments, **self.options)
            if key is not None and compiled is not None:
                if len(COMPILED) >= MOST_KNOWN:
                    COMPILED.clear()
                COMPILED[key] = compiled
            return
        stream = driver.active.get_current_stream(key[0])
        hooks = triton.knobs.runtime
        compiled.run(
            num_programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None,
            hooks.launch_enter_hook, hooks.launch_exit_hook, *arguments,
        )  # fmt: skip

    def _key(self, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What Triton may specialize on. None where only Triton can tell, or where a hook wants to know of launches."""
        hooks = triton.knobs.runtime
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            return None
        addresses = 0
        key: list[Any] = [self]
        for argument in arguments:
            kind = type(argument)
            if kind in _TENSORS:
                addresses |= argument.data_ptr()
                key.append(argument.dtype)
            elif kind in _VALUES:
                key.append(argument)
            else:
                return None
        return None if addresses % _ALIGNMENT else (driver.active.get_current_device(), *key)

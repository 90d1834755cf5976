"""Build networks without the memory of their parameters."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every parameter that this thread's modules register on `meta`; buffers stay where they are made."""
    builder = threading.get_ident()

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != builder:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        handle.remove()

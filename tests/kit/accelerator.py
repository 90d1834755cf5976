"""A CPU that behaves as CUDA does in dtypes: as an accelerator, with CUDA's rules of autocast, and CUDA's refusals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from octet.worker.fp8.accelerator import cpu_as_accelerator

aten = torch.ops.aten
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
IN_FP32_ON_CUDA_ALONE = (
    *("layer_norm", "group_norm", "rms_norm", "softmax.int", "log_softmax.int", "softplus", "exp", "log", "rsqrt"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "reciprocal", "cumsum", "sum", "sum.dim_IntList", "logsumexp"),
)
"""Ops that models use and that autocast runs in fp32 on CUDA, but as they come on CPU."""
HALVES = (torch.bfloat16, torch.float16)


class RefusesMixedDtypes(TorchDispatchMode):
    """Raises where CUDA raises and the CPU does not: norms of 16 bits with weights in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "norm" in name and func.namespace == "aten":
            dtypes = {arg.dtype for arg in args[:4] if isinstance(arg, Tensor) and arg.is_floating_point()}
            if len(dtypes) > 1:
                raise RuntimeError(f"CUDA refuses {name} of {dtypes}")
        if "dot_product" in name and "backward" not in name:
            self.attention_dtypes |= {arg.dtype for arg in args[:3]}
        return func(*args, **(kwargs or {}))


@contextmanager
def cuda_dtypes() -> Iterator[RefusesMixedDtypes]:
    """Inside, the CPU computes in the dtypes that CUDA would compute in, and refuses what CUDA refuses."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in IN_FP32_ON_CUDA_ALONE:
            library.impl(name, _in_fp32(name), "AutocastCPU")
        with cpu_as_accelerator(), RefusesMixedDtypes() as mode:
            yield mode
    finally:
        library._destroy()


def _in_fp32(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        def widen(tensor: Tensor) -> Tensor:
            return tensor.float() if tensor.dtype in HALVES else tensor

        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return op(*tree_map_only(Tensor, widen, args), **tree_map_only(Tensor, widen, kwargs))

    return run

"""Inductor's own Triton kernels without a GPU: generated with a Hopper's properties, and executed by Triton's interpreter.

Functions of CUDA's libdevice, which only a compiler has, are torch's, and so is the cast from fp32 to bf16: the interpreter's
cuts bits off, where a GPU rounds to nearest even. Kernels that were kept in a folder are compiled for
compute capability 9.0 by

    python -m tests.chip.inductor FOLDER

in a process without the interpreter. It prints what each of them takes, for every configuration that Inductor would try.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import fresh_cache
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver, interpreter

from tests.worker.kernels.cuda.compiled import resources

TARGET = GPUTarget("cuda", 90, 32)
HOPPER = DeviceProperties("cuda", 0, 132, 90, 9, 65_536, 2_048, 1_024, 32)
LIBDEVICE: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("rsqrt", "sqrt", "tanh", "erf", "exp", "exp2", "log", "log2", "sin", "cos")},
    **{"isnan": torch.isnan, "isinf": torch.isinf, "nearbyint": torch.round, "pow": torch.pow, "ldexp": torch.ldexp},
    "ilogb": lambda x: torch.frexp(x)[1] - 1,
}
CAST = interpreter.InterpreterBuilder.cast_impl


def on_arrays(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return a function of libdevice that runs one of torch's."""
    types = {torch.bool: tl.int1, torch.int32: tl.int32, torch.float32: tl.float32}

    def call(*operands: Any, _semantic: Any = None) -> Any:
        found = function(*(torch.from_numpy(np.array(operand.handle.data)) for operand in operands))
        kind = types[found.dtype]
        handle = interpreter.TensorHandle(found.numpy(), kind)
        return tl.tensor(handle, operands[0].type.with_element_ty(kind) if operands[0].type.is_block() else kind)

    return call


def cast(builder: Any, source: Any, wanted: Any) -> Any:
    """Take the place of the interpreter's cast."""
    if source.dtype.scalar != tl.float32 or wanted.scalar != tl.bfloat16:
        return CAST(builder, source, wanted)
    rounded = torch.from_numpy(np.array(source.data)).to(torch.bfloat16)
    return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)


@contextmanager
def triton_of_inductor(
    keep: Path | None = None, *, runs: bool = True, change: Callable[[str], str] = str
) -> Iterator[list[str]]:
    """Inside, Inductor compiles for the CPU by Triton. Yields the names of kernels as they are launched.

    keep: a folder for their sources. runs: False launches nothing. change: what is done to each source, to plant a fault.
    """
    launched: list[str] = []
    compile_source, launch = AsyncCompile.triton, CachingAutotuner.run

    def compile_kept(compiler: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        if keep is not None:
            (keep / f"{name}.py").write_text(source)
        return compile_source(compiler, name, change(source), device_str)

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(kernel.fn.__name__)
        return launch(kernel, *args, **kwargs) if runs else None

    active = SimpleNamespace(
        get_current_target=lambda: TARGET,
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    with ExitStack() as stack:
        for owner, name, replacement in (
            (driver, "_active", active),
            (DeviceProperties, "create", lambda _device: HOPPER),
            (AsyncCompile, "triton", compile_kept),
            (CachingAutotuner, "run", run),
            (interpreter.InterpreterBuilder, "cast_impl", cast),
            (triton_helpers, "set_driver_to_cpu", lambda: None),
            (triton_helpers, "max2", lambda x, dim: tl.max(x, dim)),
            *((triton_helpers.libdevice, name, on_arrays(function)) for name, function in LIBDEVICE.items()),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(config.patch(cpu_backend="triton", fx_graph_cache=False))
        stack.enter_context(fresh_cache())
        torch.compiler.reset()
        stack.callback(torch.compiler.reset)
        yield launched


def compiled(path: Path) -> dict[str, dict[str, int]]:
    """Compile a kept kernel for a Hopper: what each of its configurations takes."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel, found = getattr(module, path.stem), {}
    names, meta = kernel.fn.arg_names, kernel.triton_meta
    for each in kernel.configs:
        constants = {name: value for name, value in {**meta["constants"], **each.kwargs}.items() if name in names}
        signature = {name: "constexpr" if name in constants else meta["signature"][name] for name in names}
        constexprs = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel.fn, signature=signature, constexprs=constexprs, attrs=meta["configs"][0])
        options = {"num_warps": each.num_warps, "num_stages": each.num_stages}
        made = triton.compile(source, target=TARGET, options=options)
        found[f"{path.stem} {each.kwargs}"] = resources(made) | {"threads": 32 * each.num_warps}
    return found


if __name__ == "__main__":
    driver._active = SimpleNamespace(
        get_current_target=lambda: TARGET, get_current_device=lambda: 0, get_active_torch_device=lambda: torch.device("cpu")
    )
    triton_helpers.set_driver_to_cpu = lambda: None
    json.dump(
        {name: taken for path in sorted(Path(sys.argv[1]).glob("*.py")) for name, taken in compiled(path).items()}, sys.stdout
    )

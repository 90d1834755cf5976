"""The answers that torch gives inside of a chip: where tensors are, and that torch.cuda is there."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import bias as biases
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from octet.worker.fp8 import gradient, weight
from octet.worker.parallel import loop
from tests.chip import cuda, graphs, programs
from tests.chip.device import HOST, REAL_DEVICE, Chip, unseen

FACTORIES = (
    *("empty", "zeros", "ones", "full", "arange", "linspace", "rand", "randn", "randint", "randperm", "eye", "empty_strided"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "tril_indices", "triu_indices"),
)
FROM_NUMBERS = ("tensor", "as_tensor", "asarray", "scalar_tensor")
NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
HOPPER = (9, 0)
NAME = "NVIDIA H100 80GB HBM3"
NUM_BYTES = 80 << 30


class Lies:
    """The functions that take the place of torch's."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip

    def target(self, device: Any) -> int | None:
        """Return where a device is: an index, HOST, or None for devices that are neither."""
        if device is None:
            return None
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "cuda":
            return self.chip.index_of(device)
        return HOST if device.type == "cpu" else None

    def factory(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_empty = "empty" in original.__name__

        def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
            target = self.target(device)
            if device is not None:
                kwargs["device"] = device if target is None else "cpu"
            if self.chip.is_inside:
                return original(*args, **kwargs)
            with self.chip.aimed(target):
                made = original(*args, **kwargs)
            if pin_memory:
                self.chip.pin(made)
            elif target not in (None, HOST):
                self.chip.place_made(made, target, is_empty=is_empty)
            return made

        return make

    def from_numbers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Make a tensor on the host and copy it, as torch does. `scalar_tensor` fills in its number, without a copy."""

        def make(data: Any, *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
            target = self.target(device)
            if self.chip.is_inside or (device is not None and target is None):
                return original(
                    data, *args, **({"device": device if target is None else "cpu"} if device is not None else {}), **kwargs
                )
            if isinstance(data, Tensor) and original.__name__ != "tensor":
                return (
                    data.to(device, kwargs.get("dtype") or data.dtype)
                    if device is not None
                    else original(data, *args, **kwargs)
                )
            requires_grad = kwargs.pop("requires_grad", False)
            with self.chip.aimed(HOST if isinstance(data, Tensor) else None):
                made = original(data, *args, **kwargs)
            if pin_memory:
                self.chip.pin(made)
            if target not in (None, HOST):
                if original.__name__ == "scalar_tensor":
                    self.chip.place_made(made, target)
                else:
                    made = made.to(device)
            return made.requires_grad_(requires_grad) if requires_grad else made

        return make

    def new(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(tensor: Tensor, *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
            target = self.target(device)
            if device is not None:
                kwargs["device"] = device if target is None else "cpu"
            if self.chip.is_inside:
                return original(tensor, *args, **kwargs)
            with self.chip.aimed(target):
                made = original(tensor, *args, **kwargs)
            if target not in (None, HOST):
                self.chip.place_made(made, target, is_empty="empty" in original.__name__)
            return self.chip.pin(made) if pin_memory else made

        return make

    def new_tensor(
        self, tensor: Tensor, data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> Tensor:
        return torch.tensor(data, dtype=dtype or tensor.dtype, device=device or tensor.device, requires_grad=requires_grad)

    def to(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
            if self.chip.is_inside:
                return original(tensor, *args, copy=copy, **kwargs)
            if args and isinstance(args[0], Tensor):
                kwargs = {"device": args[0].device, "dtype": args[0].dtype, **kwargs}
                args = args[1:]
            if len(args) > 3 or (len(args) > 2 and not isinstance(args[1], torch.dtype)):
                *args, copy = args
            device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
            target, source = self.target(device), self.chip.device_of(tensor)
            options = {
                "dtype": dtype or tensor.dtype,
                "non_blocking": non_blocking,
                "memory_format": memory_format or torch.preserve_format,
            }
            if REAL_DEVICE.__get__(tensor).type != "cpu" or (device is not None and target is None):
                moved = torch.device("cpu") if target is not None else device or REAL_DEVICE.__get__(tensor)
                return original(tensor, moved, copy=copy, **options)
            if target is None or target == source:
                return original(tensor, copy=copy, **options)
            with self.chip.aimed(target):
                return original(tensor, copy=True, **options)

        return to

    def pin_memory(self, tensor: Tensor, _device: Any = None) -> Tensor:
        if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            return type(tensor).__torch_dispatch__(torch.ops.aten._pin_memory.default, (type(tensor),), (tensor,), {})
        return tensor if self.is_pinned(tensor) else self.chip.pin(tensor.clone(memory_format=torch.preserve_format))

    def is_pinned(self, tensor: Tensor, _device: Any = None) -> bool:
        block = self.chip.block_of(tensor)
        return block is not None and block.device is None

    def read(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Read values on the host: those of a device after a wait, those of pinned memory if they have arrived."""

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.chip.is_inside:
                return original(tensor, *args, **kwargs)
            if self.chip.device_of(tensor) != HOST:
                if original.__name__ != "tolist":
                    raise TypeError(f"can't convert {tensor.device} device type tensor to numpy")
                return original(tensor.cpu())
            self.chip.touch(self.chip.host, [tensor], [])
            return original(tensor, *args, **kwargs)

        return read

    def resize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            block = self.chip.memory.blocks.get(storage._cdata)
            if block is None or storage.nbytes() == size:
                return original(storage, size)
            owner = self.chip.streams[block.device or 0].timeline
            self.chip.memory.resize(block, owner, lambda: original(storage, size))
            return storage

        return resize_

    def deepcopy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Copy a storage to where it is. No mode sees that."""

        def deepcopy(storage: torch.UntypedStorage, memo: Any) -> Any:
            with self.chip.inside():
                made = original(storage, memo)
            block = self.chip.memory.blocks.get(storage._cdata)
            if block is not None and block.device is not None and made._cdata not in self.chip.memory.blocks:
                self.chip.memory.add(made, block.device, self.chip.begin_launch(block.device)).awaits_tensor = True
            return made

        return deepcopy

    def make_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Make a tensor without memory of its own that is on a device."""

        def make(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            target = self.target(device)
            made = original(*args, device=device if target is None else "cpu", **kwargs)
            if target not in (None, HOST):
                made._chip_index = target
            return made

        return make

    def record_stream(self, tensor: Tensor, stream: cuda.Stream) -> None:
        """Let the owner of a tensor's memory reuse it only after what the stream does now."""
        block = self.chip.block_of(tensor)
        assert block is not None
        block.owner.join(stream.timeline.clock)


@contextmanager
def autocast_of_the_cpu() -> Iterator[None]:
    """Let autocast of CUDA be the CPU's, in whose dtypes the twins of the roads in tests/golden compute."""
    begin, is_on, dtype_of = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def named(device_type: str) -> str:
        return "cpu" if device_type == "cuda" else device_type

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, named(device_type), *args, **kwargs)

    with (
        mock.patch.object(torch.autocast, "__init__", init),
        mock.patch.object(torch, "is_autocast_enabled", lambda device_type="cuda": is_on(named(device_type))),
        mock.patch.object(torch, "get_autocast_dtype", lambda device_type: dtype_of(named(device_type))),
        mock.patch.object(torch, "get_autocast_gpu_dtype", partial(dtype_of, "cpu")),  # torchao's
    ):
        yield


def torch_cuda(chip: Chip) -> dict[str, Any]:
    """Return what takes the place of torch.cuda's names."""

    @contextmanager
    def on(device: Any) -> Iterator[None]:
        before, chip.current_device = chip.current_device, chip.index_of(device)
        try:
            yield
        finally:
            chip.current_device = before

    def set_device(device: Any) -> None:
        chip.current_device = chip.index_of(device)

    def synchronize(_device: Any = None) -> None:
        chip.count_wait("cuda.synchronize")
        for stream in chip.all_streams:
            chip.host.join(stream.timeline.clock)

    def num_bytes(_device: Any = None) -> int:
        return chip.memory.num_bytes

    properties = SimpleNamespace(name=NAME, total_memory=NUM_BYTES, uuid="0", multi_processor_count=132, major=9, minor=0)
    generators = [torch.Generator() for _ in range(chip.num_devices)]
    return {
        "Stream": cuda.Stream, "Event": cuda.Event, "stream": cuda.stream, "current_stream": chip.current_stream,
        "CUDAGraph": graphs.CudaGraph, "graph": graphs.capture, "graph_pool_handle": graphs.new_pool,
        "is_current_stream_capturing": lambda: chip.graph is not None,
        "device": on, "set_device": set_device, "synchronize": synchronize, "current_device": lambda: chip.current_device,
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: chip.num_devices,
        "get_device_capability": lambda _device=None: HOPPER, "get_device_name": lambda _device=None: NAME,
        "get_device_properties": lambda _device=None: properties,
        "mem_get_info": lambda _device=None: (NUM_BYTES - chip.memory.num_bytes, NUM_BYTES),
        "max_memory_allocated": num_bytes, "memory_allocated": num_bytes, "max_memory_reserved": num_bytes,
        "reset_peak_memory_stats": lambda _device=None: None,
        "empty_cache": lambda: None, "default_generators": generators,
        "get_rng_state": lambda device=None: generators[chip.index_of(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[chip.index_of(device)].set_state(state),
        "manual_seed_all": lambda seed: [each.manual_seed(seed) for each in generators],
    }  # fmt: skip


class _Driver:
    """Tells Triton of the chip's current device."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.chip.current_device

    def get_current_stream(self, device: int) -> int:
        return device


def method(bound: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that a class binds to its objects."""
    return lambda tensor, *args, **kwargs: bound(tensor, *args, **kwargs)


@contextmanager
def chip_of(num_devices: int = 1) -> Iterator[Chip]:
    """Inside, torch has CUDA devices that check what runs."""
    chip = Chip(num_devices)
    cuda.Stream.chip = chip
    chip.make_streams()
    lies = Lies(chip)
    with ExitStack() as stack:

        def replace(owner: Any, name: str, replacement: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, replacement))

        for name in FACTORIES:
            replace(torch, name, lies.factory(getattr(torch, name)))
        for name in FROM_NUMBERS:
            replace(torch, name, lies.from_numbers(getattr(torch, name)))
        for name in NEW:
            replace(Tensor, name, lies.new(getattr(Tensor, name)))
        for name in ("tolist", "numpy", "__array__"):
            replace(Tensor, name, lies.read(getattr(Tensor, name)))
        make_wrapper = lies.make_wrapper(Tensor._make_wrapper_subclass)
        replace(Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper))
        for module in (weight, gradient, loop):
            replace(module, "make_wrapper_subclass", make_wrapper)
        for name, replacement in {
            "new_tensor": method(lies.new_tensor),
            "to": lies.to(Tensor.to),
            "cuda": lambda tensor, device=None, **options: tensor.to(torch.device("cuda", chip.index_of(device)), **options),
            "cpu": lambda tensor, **options: tensor.to("cpu", **options),
            "pin_memory": method(lies.pin_memory),
            "is_pinned": method(lies.is_pinned),
            "record_stream": method(lies.record_stream),
            "get_device": lambda tensor: chip.device_of(tensor),
            "device": property(chip.device_property),
            "is_cuda": property(lambda tensor: tensor.device.type == "cuda"),
            "is_cpu": property(lambda tensor: tensor.device.type == "cpu"),
        }.items():
            replace(Tensor, name, replacement)
        replace(torch.UntypedStorage, "resize_", lies.resize(torch.UntypedStorage.resize_))
        replace(torch.UntypedStorage, "__deepcopy__", lies.deepcopy(torch.UntypedStorage.__deepcopy__))
        for name, replacement in torch_cuda(chip).items():
            replace(torch.cuda, name, replacement)
        replace(torch, "histc", histc(torch.histc))
        replace(functional, "scaled_dot_product_attention", attention(functional.scaled_dot_product_attention))
        replace(driver, "_active", _Driver(chip))
        replace(biases, "causal_lower_right", unseen(biases.causal_lower_right, chip))  # torch cannot make one inside a mode
        stack.enter_context(autocast_of_the_cpu())
        stack.enter_context(programs.checked(chip))
        stack.enter_context(chip)
        yield chip


def histc(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Count whole numbers, as CUDA does and a CPU does not."""

    def count(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return original(values.float(), *args, **kwargs).to(values.dtype)

    return count


def attention(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Take values that are narrower than keys, as CUDA's kernels do; a CPU's would make a mask on the host."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mask = kwargs.get("attn_mask")
        if isinstance(mask, biases.CausalBias):  # which looks for torch's own function, not for this one
            return biases.CausalBias._dispatch(query, key, value, **kwargs)
        missing = key.shape[-1] - value.shape[-1]
        if missing <= 0:
            return original(query, key, value, *args, **kwargs)
        return original(query, key, functional.pad(value, (0, missing)), *args, **kwargs)[..., :-missing]

    return attend

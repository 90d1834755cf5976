"""Keep in FP8 what blocks save for their backward pass: half the bytes of bf16, a quarter of those of fp32.

The forward pass computes what it always does. Inside a block, each activation that autograd saves becomes E4M3 codes with one
scale for each row of its memory (Chen et al. 2021, ActNN, arXiv 2104.14129, with FP8 in the place of integers), and the
backward pass reads their values. So gradients have the error of that rounding, at most 2^-4 of each saved element in range.
Left as they are: parameters and constants, statistics (of norms and of attention), codes that FP8 layers keep already, and
short rows. `fp8_partitioner.py` does it in compiled blocks.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from octet.worker import kernels
from octet.worker.common.wrap import Nesting, Wrapper, wrap, wrapper_of
from octet.worker.fp8.bf16 import is_marked_activation
from octet.worker.fp8.gate_forward import ActivationForward, GatedForward
from octet.worker.fp8.norm_forward import NormForward
from octet.worker.kernels.formats import E4M3
from octet.worker.kernels.torch_private import key_of_storage, version_of
from octet.worker.models.blocks import repeated_blocks
from octet.worker.prepare.fp8_partitioner import has_long_rows, order_in_memory, partitioned_in_fp8

_VIEWS_OF_WEIGHTS = {"ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "PermuteBackward0"}


class SavedCodes(NamedTuple):
    """A saved activation. codes: E4M3, contiguous in the order of the activation's memory. dims: that order."""

    codes: Tensor
    dequant_scale: Tensor
    dtype: torch.dtype
    dims: tuple[int, ...]

    def values(self) -> Tensor:
        """Return the activation with rounded values, in its shape, dtype and order of memory."""
        inverse = sorted(range(len(self.dims)), key=self.dims.__getitem__)
        return kernels.dequantize(self.codes, self.dequant_scale, self.dtype).permute(inverse)


def keep_activations_in_fp8(model: nn.Module) -> int:
    """Let each repeated block of a model keep its activations in FP8 for the backward pass. Returns their number.

    Call it after `initialize`. To compile such blocks, call `compile_blocks` next: torch.compile by itself leaves their graphs.
    They are not checkpointed, which decides itself what is kept. Raises ValueError for a model that repeats no blocks.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise ValueError(
            "the model repeats no blocks, and only inside of blocks activations are kept in FP8; allowed: models with an "
            "nn.ModuleList or nn.Sequential of alike blocks. Leave out saved_activations."
        )
    for block in blocks:
        wrap(block, SavingForward())
        for part in block.modules():
            for kind in (NormForward, GatedForward, ActivationForward):
                if (forward := wrapper_of(part, kind)) is not None:
                    forward.saves_in_fp8 = True
    return len(blocks)


class SavedAsItIs(NamedTuple):
    """A saved tensor that stays as it is. version: torch's count of writes into it, which torch checks only without hooks."""

    tensor: Tensor
    version: int

    def values(self) -> Tensor:
        """Return the tensor. Raises RuntimeError if something was written into it since."""
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)}, which a block keeps for its backward pass, was written into "
                "after its forward pass; allowed: after the backward pass, or into a clone."
            )
        return self.tensor


class SavingForward(Wrapper):
    """Computes one block and keeps its activations in FP8."""

    nesting = Nesting.SAVING
    is_left_to_compiler = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or (self.is_left_to_compiler and torch.compiler.is_compiling()):
            return self.run(*args, **kwargs)
        with saved_tensors_hooks(_Saver().pack, _unpack):
            return self.run(*args, **kwargs)

    def leave_to_compiler(self, backend: str) -> dict[str, Any]:
        """Let the graphs of a compiled block keep activations in FP8 instead. Returns arguments for torch.compile."""
        self.is_left_to_compiler = True
        return partitioned_in_fp8(backend)


class _Saver:
    """Quantizes what one forward pass of a block saves. What several ops save is kept once."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[weakref.ref[Any], SavedCodes]] = {}

    def pack(self, saved: Tensor) -> SavedAsItIs | SavedCodes:
        if not _is_activation(saved):
            # The result of an op holds the op's node, which would hold it: neither would ever be freed without a backward pass.
            return SavedAsItIs(saved if saved.is_leaf else saved.detach(), version_of(saved))
        storage = saved.untyped_storage()
        key = (key_of_storage(storage), saved.storage_offset(), saved.shape, saved.stride(), version_of(saved))
        if key in self.known and self.known[key][0]() is storage:
            return self.known[key][1]
        dims = order_in_memory(saved)
        codes, dequant_scale = kernels.quantize(saved.permute(dims), E4M3.dtype, "row")
        packed = SavedCodes(codes, dequant_scale, saved.dtype, dims)
        self.known[key] = (weakref.ref(storage), packed)
        return packed


def _unpack(packed: SavedAsItIs | SavedCodes) -> Tensor:
    return packed.values()


def _is_activation(saved: Tensor) -> bool:
    """Return whether a tensor has long rows and gradients; statistics and constants have none."""
    is_differentiated = saved.requires_grad or is_marked_activation(saved)
    return is_differentiated and has_long_rows(saved) and not _is_of_parameter(saved)


def _is_of_parameter(saved: Tensor) -> bool:
    """Return whether a tensor is a parameter, viewed or cast."""
    if saved.is_leaf:
        return isinstance(saved, nn.Parameter)
    node = saved.grad_fn
    while node is not None and node.name() in _VIEWS_OF_WEIGHTS:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"

"""ZeRO stage 3: the weights of a model's repeated blocks are divided over the ranks, and whole only while a block computes.

A block's weights are gathered before its forward pass and before its backward pass, as they are stored: as codes where the
level holds codes. They are freed after it; the next block's gather is under way meanwhile. What is outside of blocks
(embeddings, the last norm, the head, a weight that two blocks share) stays whole on every rank, and so do frozen weights.

All ranks run the same blocks in the same order; a rank that skips one leaves the others waiting, and is named when they have
waited too long (`worker/mesh/verdict.py`). Gathers have a communicator
of their own, because exchanges of gradients may meet them in another order on each rank. Between passes a parameter keeps its
shape and reads as NaN. Checkpointing is inside, `torch.compile` around it, this outermost: none of it is traced. Autograd runs
the nodes of the newest block first, so a block is done when an earlier one's output gets its gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from octet.worker.kernels.torch_private import backward_pass, call_after_backward
from octet.worker.mesh import Axis, twin_of
from octet.worker.optim import QuantizedWeight
from octet.worker.parallel.buckets import Bucket
from octet.worker.parallel.gathered_bucket import GatheredBucket

T = TypeVar("T")


class ShardedBlocks:
    """The blocks of a model whose weights one rank holds a share of. `order` is that of the forward pass."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        buckets: Iterable[Bucket],
        quantized: Mapping[Tensor, QuantizedWeight],
        axis: Axis,
        sent_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Divide the weights of the buckets. Each bucket lies in one block, and has pieces.

        quantized: the weights that are held as codes, by piece. sent_dtype: the dtype in which fp32
        weights travel.
        """
        self.axis, self.gathers = axis, twin_of(axis)
        self.is_saving_pieces = False
        """True while state dicts keep what a released parameter holds; whoever puts the pieces in sets it, and sets it back."""
        home = {parameter: index for index, block in enumerate(blocks) for parameter in block.parameters()}
        held: dict[int, list[GatheredBucket]] = {}
        for bucket in buckets:
            held.setdefault(home[bucket.parameters[0]], []).append(GatheredBucket(bucket, quantized, self.gathers, sent_dtype))
        self.order = [ShardedBlock(self, index, blocks[index], held[index]) for index in sorted(held)]
        self.parameters = frozenset(parameter for block in self.order for parameter in block.parameters)
        self._in_backward: list[ShardedBlock] = []

    def start_next(self, block: "ShardedBlock", step: int) -> None:
        """Start to gather the block after this one, or before it if step is -1, while this one computes."""
        index = self.order.index(block) + step
        if 0 <= index < len(self.order):
            self.order[index].start()

    def enter_backward(self, block: "ShardedBlock") -> None:
        """Make a block whole for its backward pass; those whose turn has passed are freed."""
        if not self._in_backward:
            call_after_backward(self.release)
        for done in self._in_backward:
            if done is not block:
                done.release()
        block.gather()
        self._in_backward = [block]
        self.start_next(block, -1)

    def release(self) -> None:
        """Free all weights that are whole, or on their way."""
        self._in_backward = []
        for block in self.order:
            block.release()

    def check(self) -> None:
        """Raise ValueError if parameters have other memory than before, or if a call of a block no longer gathers it."""
        for block in self.order:
            block.check()

    def take_part(self) -> None:
        """Gather the weights of all blocks, in step with ranks that pass a batch through them."""
        for block in self.order:
            block.gather()
            self.start_next(block, 1)
            block.release()


class ShardedBlock:
    """One block. Its call, its state dict and the loading of one gather its weights."""

    def __init__(self, blocks: ShardedBlocks, index: int, module: nn.Module, weights: list[GatheredBucket]) -> None:
        """index: of the block in the model, from 0."""
        self.blocks, self.index, self.module, self.weights = blocks, index, module, weights
        self.parameters = [parameter for part in weights for parameter in part.bucket.parameters]
        self._call = _GatheringCall(self, module._compiled_call_impl or module._call_impl)
        module._compiled_call_impl = self._call
        module.register_load_state_dict_pre_hook(self._before_loading)
        module.register_load_state_dict_post_hook(self._after_loading)
        module.register_state_dict_pre_hook(partial(self._before_saving))
        module.register_state_dict_post_hook(partial(self._after_saving))

    def start(self) -> None:
        """Start to gather the weights that are neither there nor on their way."""
        if any(part.is_away for part in self.weights):
            self.blocks.gathers.waits.note_block(self.index)
        for part in self.weights:
            part.start()

    def gather(self) -> None:
        """Make the parameters whole."""
        self.start()
        for part in self.weights:
            part.bind()

    def release(self) -> None:
        """Free all but this rank's share."""
        for part in self.weights:
            part.release()

    def check(self) -> None:
        """See `ShardedBlocks.check`."""
        if self.module._compiled_call_impl is not self._call:
            raise ValueError(
                f"a {type(self.module).__name__} was compiled after the model was made parallel at ZeRO stage 3; allowed: "
                "before it, so that what gathers its weights is outside of the graph. Compile it before parallelize."
            )
        for part in self.weights:
            part.check()

    def __reduce__(self) -> NoReturn:
        """Refuse copies of the module, which its hooks would bring here."""
        raise ValueError(
            "the weights of this model's blocks are divided over the ranks (ZeRO stage 3); allowed: copies of models that hold "
            "them. Load state_dict(), called by all ranks together, into a new model."
        )

    def _before_loading(self, *_load: Any) -> None:
        self.gather()

    @torch.no_grad()
    def _after_loading(self, *_load: Any) -> None:
        """Keep the own share of the loaded weights."""
        for part in self.weights:
            part.keep_share()
        self.release()

    def _before_saving(self, *_save: Any) -> None:
        if not self.blocks.is_saving_pieces:
            self.gather()

    @torch.no_grad()
    def _after_saving(self, _module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        """Move the block's whole weights to the host, where there is room for those of all blocks, and free them."""
        if self.blocks.is_saving_pieces:
            return
        moved: dict[Tensor, Tensor] = {}  # tied weights stay one tensor
        for name, held in state_dict.items():
            if name.startswith(prefix) and isinstance(held, Tensor) and any(part.holds(held) for part in self.weights):
                state_dict[name] = moved.setdefault(held, held.detach().to("cpu", copy=True))
        self.release()


class _GatheringCall:
    """The call of a block that gathers its weights before, and frees them afterwards."""

    def __init__(self, block: ShardedBlock, call: Callable[..., Any]) -> None:
        self.block, self.call = block, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block
        block.gather()
        if backward_pass() != -1:  # a checkpoint computes it again: its backward pass follows, and frees it
            return self.call(*args, **kwargs)
        block.blocks.start_next(block, 1)
        try:
            outputs = self.call(*args, **kwargs)
        finally:
            block.release()
        if torch.is_grad_enabled():
            for tensor in _tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._before_backward)
        return outputs

    def _before_backward(self, _gradient: Tensor) -> None:
        self.block.blocks.enter_backward(self.block)


def parameters_of_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[Tensor, int]:
    """Return the trainable parameters that lie in one block alone, each with the block's index."""
    homes: dict[nn.Module, set[int]] = {}
    for index, block in enumerate(blocks):
        for module in block.modules():
            homes.setdefault(module, set()).add(index)
    found: dict[Tensor, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                found.setdefault(parameter, set()).update(homes.get(module, {-1}))
    return {parameter: min(indices) for parameter, indices in found.items() if len(indices) == 1 and min(indices) >= 0}


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in the outputs of a block."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        yield from _tensors(list(outputs.values()))
    elif isinstance(outputs, list | tuple):
        for output in outputs:
            yield from _tensors(output)

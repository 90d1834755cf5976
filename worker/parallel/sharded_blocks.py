"""ZeRO stage 3: the weights of a model's repeated blocks are divided over the ranks, and whole only while a block computes.

A block's weights are gathered before its forward pass and before its backward pass, as they are stored: as codes where the
level holds codes. They are freed after it; the next block's gather is under way meanwhile. The weights of a language model's
embedding and head are divided as well. The embedding is gathered for its forward pass alone, and the head stays whole from its
forward pass to its backward pass. A tied weight is divided once and gathered by both. What else is outside of blocks
(positions, the last norm, a weight that two blocks share) stays whole on every rank, and so do frozen weights.

All ranks run the same blocks in the same order; a rank that skips one leaves the others waiting, and is named when they have
waited too long (`worker/mesh/verdict.py`). Gathers have a communicator of their own, so that none waits for an exchange of
gradients. NCCL requires one order of both on all ranks, and which parameters get a gradient may differ between them. So a
block's gradients are exchanged after the gathers with which its backward pass begins, and before those of the next block's.
Between passes a parameter keeps its shape and reads as NaN. Checkpointing is inside, `torch.compile` around it, this outermost:
none of it is traced. Autograd runs the nodes of the newest block first, so a block is done when an earlier one's output gets
its gradient; one that is called again before its backward pass, at the end.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from octet.worker.kernels.torch_private import backward_pass, call_after_backward, key_of_storage
from octet.worker.mesh import twin_of
from octet.worker.models.linear_cross_entropy import DeferredLogits
from octet.worker.optim import QuantizedWeight
from octet.worker.parallel.buckets import Bucket
from octet.worker.parallel.data_parallel import GradientBuckets
from octet.worker.parallel.gathered_bucket import GatheredBucket

T = TypeVar("T")


class ShardedBlocks:
    """The modules of a model whose weights one rank holds a share of. `order` is that of the forward pass."""

    def __init__(
        self,
        divided: "Divided",
        buckets: Iterable[Bucket],
        quantized: Mapping[Tensor, QuantizedWeight],
        gradients: GradientBuckets,
        sent_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Divide the weights of the buckets. Each bucket lies in one module, or in both ends, and has pieces.

        quantized: the weights that are held as codes, by piece. gradients: all buckets, which from now on are exchanged in the
        turns of their blocks. sent_dtype: the dtype in which fp32 weights travel.
        """
        self.axis, self.gathers = gradients.axis, twin_of(gradients.axis)
        self._gradients = ref(gradients)  # which goes with the optimizer, not with the model
        gradients.is_open = self._is_in_turn
        self.is_saving_pieces = False
        """True while state dicts keep what a released parameter holds; whoever puts the pieces in sets it, and sets it back."""
        held: dict[int, list[GatheredBucket]] = {}
        for bucket in buckets:
            home = divided.homes[bucket.parameters[0]]
            held.setdefault(home, []).append(GatheredBucket(bucket, quantized, self.gathers, sent_dtype))
        num_blocks = len(divided.blocks)
        self.order = [ShardedBlock(self, divided.blocks[home], held[home], home) for home in sorted(held) if home < num_blocks]
        for end in divided.ends:
            home = divided.homes[end.get_parameter("weight")]
            if isinstance(end, nn.Embedding):
                self.order.insert(0, ShardedEmbedding(self, end, held[home]))
            else:
                self.order.append(ShardedHead(self, end, held[home]))
        self.parameters = frozenset(parameter for block in self.order for parameter in block.parameters)
        self._holders: dict[Bucket, list[ShardedBlock]] = {}
        for block in self.order:
            for part in block.weights:
                self._holders.setdefault(part.bucket, []).append(block)
        self._moved: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()
        self._whole: ShardedBlock | None = None
        """The block that stays whole after its forward pass, or that computes its backward pass."""
        self._is_in_backward = False

    def start_next(self, block: "ShardedBlock", step: int) -> None:
        """Start to gather what follows this block, or comes before it in the backward pass if step is -1."""
        index = self.order.index(block) + step
        if 0 <= index < len(self.order) and (step > 0 or self.order[index].has_backward):
            self.order[index].start()

    def keep_whole(self, block: "ShardedBlock") -> None:
        """Leave a block whole until another one's backward pass begins."""
        self._whole = block

    def enter_backward(self, block: "ShardedBlock") -> None:
        """Make a block whole for its backward pass; the one whose turn has passed is freed."""
        if not self._is_in_backward:
            call_after_backward(self.release)
        self._is_in_backward = True
        if self._whole is not None and self._whole is not block:
            self._whole.release()
            self._whole.is_done = True
            if (gradients := self._gradients()) is not None:
                gradients.launch_due(self._is_done)
        block.gather()
        self._whole, block.is_ahead = block, False
        self.start_next(block, -1)

    def release(self) -> None:
        """Free all weights that are whole, or on their way."""
        self._whole, self._is_in_backward = None, False
        for block in self.order:
            block.release()
            block.is_done = False

    def forget_calls(self) -> None:
        """Begin a step: no backward pass of an earlier forward pass is to come."""
        for block in self.order:
            block.is_ahead = block.is_repeated = False

    def _is_in_turn(self, bucket: Bucket) -> bool:
        """Return True if no gather of the backward pass can come before what it still computes for the bucket."""
        holders = self._holders.get(bucket, ())
        return bool(holders) and all((block is self._whole or block.is_done) and not block.is_repeated for block in holders)

    def _is_done(self, bucket: Bucket) -> bool:
        """Return True if the backward pass has left the bucket's block for good."""
        return self._is_in_turn(bucket) and all(block.is_done for block in self._holders[bucket])

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

    def moved(self, held: Tensor, state_dict: Mapping[str, Any]) -> Tensor:
        """Return a whole weight's copy on the host; the one in the state dict, if a layer that shares it has made it."""
        key = key_of_storage(held.untyped_storage()), int(held.storage_offset())
        copy = self._moved.get(key)
        if copy is None or not any(copy is other for other in state_dict.values()):
            copy = self._moved[key] = held.detach().to("cpu", copy=True)
        return copy


class ShardedBlock:
    """One block, or an end. Its call, its state dict and the loading of one gather its weights."""

    has_backward = True
    """True if its backward pass needs the weights."""

    def __init__(
        self, blocks: ShardedBlocks, module: nn.Module, weights: list[GatheredBucket], index: int | None = None
    ) -> None:
        """index: of the block in the model, from 0; None for an end."""
        self.blocks, self.index, self.module, self.weights = blocks, index, module, weights
        self.parameters = frozenset(parameter for part in weights for parameter in part.bucket.parameters)
        self._places = [
            (layer, name, parameter)
            for layer in module.modules()
            for name, parameter in layer._parameters.items()
            if parameter in self.parameters
        ]
        self.is_ahead = False
        """True from a forward pass, with gradients, to its backward pass."""
        self.is_repeated = False
        """True if another forward pass came before the backward pass."""
        self.is_done = False
        """True from the end of its backward pass to that of the model's."""
        self._call = _GatheringCall(self, module._compiled_call_impl or module._call_impl)
        module._compiled_call_impl = self._call
        module.register_load_state_dict_pre_hook(self._before_loading)
        module.register_load_state_dict_post_hook(self._after_loading)
        module.register_state_dict_pre_hook(partial(self._before_saving))
        module.register_state_dict_post_hook(partial(self._after_saving))

    def start(self) -> None:
        """Start to gather the weights that are neither there nor on their way."""
        if self.index is not None and any(part.is_away for part in self.weights):
            self.blocks.gathers.waits.note_block(self.index)
        for part in self.weights:
            part.start()

    def gather(self) -> None:
        """Make the parameters whole."""
        self.start()
        for part in self.weights:
            part.bind()

    def check_ties(self) -> None:
        """Raise ValueError if a layer holds a parameter that was divided as another block's: this one does not gather it."""
        for layer, name, parameter in self._places:
            held: Any = layer._parameters.get(name)
            if held is not parameter and held in self.blocks.parameters and held not in self.parameters:
                raise ValueError(
                    f"{name} of a {type(layer).__name__} is tied to a weight of another block after the model was made "
                    "parallel at ZeRO stage 3, which gathers each block's own; allowed: ties that are made before. Tie them "
                    "before parallelize."
                )

    def release(self) -> None:
        """Free all but this rank's share."""
        for part in self.weights:
            part.release()

    def after_forward(self, outputs: Any) -> Any:
        """Free the weights after a forward pass. Returns the outputs, whose gradients gather the weights again."""
        self.release()
        if self.has_backward and torch.is_grad_enabled():
            self.follow(outputs)
        return outputs

    def follow(self, outputs: Any) -> None:
        """Begin the backward pass of this block when a tensor of its outputs gets its gradient."""
        for tensor in _tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._before_backward)

    def _before_backward(self, _gradient: Tensor) -> None:
        self.blocks.enter_backward(self)

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
            "weights of this module are divided over the ranks (ZeRO stage 3); allowed: copies of models that hold them. "
            "Load state_dict(), called by all ranks together, into a new model."
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
        for name, held in state_dict.items():
            if name.startswith(prefix) and isinstance(held, Tensor) and any(part.holds(held) for part in self.weights):
                state_dict[name] = self.blocks.moved(held, state_dict)
        self.release()


class ShardedEmbedding(ShardedBlock):
    """The embedding of a language model. Its gradient is made of tokens alone."""

    has_backward = False


class ShardedHead(ShardedBlock):
    """The head of a language model, whose backward pass follows its forward pass."""

    def after_forward(self, outputs: Any) -> Any:
        """Keep the weights where gradients are computed. Logits that do not exist yet gather them before a pass reads them."""
        if not torch.is_grad_enabled():
            self.release()
            return outputs
        self.blocks.keep_whole(self)
        if isinstance(outputs, DeferredLogits):
            # A view, as autograd saves it: it sees the values again, where the parameter itself is a placeholder by then.
            return outputs._replace(weight=outputs.weight.view_as(outputs.weight), gather=self._gather_for_loss)
        self.follow(outputs)
        return outputs

    def _gather_for_loss(self) -> None:
        if backward_pass() == -1:
            self.gather()
        else:
            self.blocks.enter_backward(self)


class _GatheringCall:
    """The call of a block that gathers its weights before, and frees them afterwards."""

    def __init__(self, block: ShardedBlock, call: Callable[..., Any]) -> None:
        self.block, self.call = block, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block
        block.check_ties()
        block.gather()
        if backward_pass() != -1:  # a checkpoint computes it again: its backward pass follows, and frees it
            return self.call(*args, **kwargs)
        if torch.is_grad_enabled():
            block.is_repeated |= block.is_ahead
            block.is_ahead = True
        block.blocks.start_next(block, 1)
        try:
            outputs = self.call(*args, **kwargs)
        except BaseException:
            block.release()
            raise
        return block.after_forward(outputs)


class Divided(NamedTuple):
    """The parts of a model that stage 3 divides.

    ends: the layers of a vocabulary, embedding first. homes: where each divided parameter lies: the index of its block, or a
    number from `len(blocks)` on for the weight of an end.
    """

    blocks: Sequence[nn.Module]
    ends: Sequence[nn.Module]
    homes: Mapping[Tensor, int]


def divide_model(model: nn.Module, blocks: Sequence[nn.Module], ends: Sequence[nn.Module]) -> Divided:
    """Find what is divided: trainable parameters that lie in one block alone, and weights that the ends alone have."""
    places: dict[nn.Module, set[int]] = {}
    for index, block in enumerate(blocks):
        for module in block.modules():
            places.setdefault(module, set()).add(index)
    found: dict[Tensor, set[int]] = {}
    holders: dict[Tensor, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                found.setdefault(parameter, set()).update(places.get(module, {-1}))
                holders.setdefault(parameter, set()).add(module)
    homes = {parameter: min(indices) for parameter, indices in found.items() if len(indices) == 1 and min(indices) >= 0}
    weights = {end: end._parameters.get("weight") for end in ends}
    divided_ends = [end for end, weight in weights.items() if weight in holders and holders[weight] <= set(ends)]
    for number, end in enumerate(divided_ends, len(blocks)):
        homes.setdefault(end.get_parameter("weight"), number)
    return Divided(blocks, divided_ends, homes)


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in the outputs of a block."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        yield from _tensors(list(outputs.values()))
    elif isinstance(outputs, list | tuple):
        for output in outputs:
            yield from _tensors(output)

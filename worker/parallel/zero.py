"""ZeRO: a rank holds optimizer states, master weights and residuals of its share of each bucket, and steps it.

A rank's share is even to the element and may hold parts of tensors. Gradients arrive as means of the own share alone; after
the step the ranks agree on the weights' scales and gather each other's new weights as they are stored: as codes where the level
holds codes. In between every rank has the whole weights, but at stage 3 not those of blocks, embedding and head
(`sharded_blocks.py`). A step has the bits of a step without sharding: the same elements are rounded at the same places with the
same random numbers. Only the norm is summed in another order (in float64).

`optimizer.state_dict()` is that of the whole optimizer, on every rank; all ranks call it together. `load_state_dict` takes the
same, saved at any number of ranks. For checkpoints, `state_dicts_in_pieces` puts nothing together.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn

from octet.api_schemas.bucket_layout import Piece
from octet.worker.common.deferred import sliceable
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.fp8.weight import Float8Weight, is_float8_weight, stored
from octet.worker.fp8.weights import decode_values
from octet.worker.kernels.formats import BLOCK
from octet.worker.mesh import Axis, Pending, TensorInPieces
from octet.worker.models.blocks import repeated_blocks
from octet.worker.models.wrapped import vocabulary_layers
from octet.worker.optim import LowBitOptimizer, QuantizedWeight
from octet.worker.optim.rules.rule import Group
from octet.worker.optim.sharding import cut_into_pieces, make_piece, shares_memory
from octet.worker.optim.shards import agree_on_finite, agree_on_weight_scales
from octet.worker.parallel.buckets import Bucket
from octet.worker.parallel.data_parallel import GradientBuckets, in_turn
from octet.worker.parallel.norm import clip_together
from octet.worker.parallel.sharded_blocks import Divided, ShardedBlocks, divide_model
from octet.worker.prepare.export_state_dict import OwnParameters

ZERO_STAGES = (0, 1, 2, 3)


def check_zero(model: nn.Module, zero_stage: int, replicas: Axis) -> Divided | None:
    """Return the weights that the stage divides; None below stage 3, or on one rank.

    Raises ValueError for another stage, and at stage 3 for a model without blocks that repeat.
    """
    if zero_stage not in ZERO_STAGES:
        raise ValueError(
            f"zero_stage is {zero_stage}; allowed: {', '.join(map(str, ZERO_STAGES))}. Stage 3 shards weights, gradients, "
            "optimizer states and master weights."
        )
    if zero_stage < 3 or replicas.size == 1:
        return None
    blocks = repeated_blocks(model)
    if not blocks:
        raise ValueError(
            "zero_stage is 3 and the model repeats no blocks; allowed: models with an nn.ModuleList or nn.Sequential of alike "
            "blocks, whose weights are gathered one block at a time. Use zero_stage=2."
        )
    return divide_model(model, blocks, vocabulary_layers(model))


class ShardedStates:
    """The optimizer of one rank, which steps the rank's pieces of all trainable parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: GradientBuckets,
        owners: Axis,
        counts: Callable[[Tensor], bool],
        stage: Axis | None,
        zero_stage: int,
    ) -> None:
        """Cut the optimizer's states, and let the buckets deliver to pieces.

        owners: the ranks that hold one model between them, and agree on norms and skipped steps. counts: returns True if this
        rank's pieces of a parameter count there. stage: the ranks that agree on scales, by default those of each bucket.

        Raises ValueError for an optimizer that is not ours, and for a parameter that is not contiguous.
        """
        if not isinstance(optimizer, LowBitOptimizer):
            raise ValueError(
                f"zero_stage is {zero_stage} and the optimizer a {type(optimizer).__name__}; allowed: AdamW, Adam "
                "and Lion after initialize. Use one of these, or zero_stage=0."
            )
        self.optimizer, self.gradients, self.axis = optimizer, gradients, gradients.axis
        self.owners, self.counts, self.stage = owners, counts, stage
        gradients.reduces_each_pass = zero_stage >= 2
        self._own_finite = optimizer.all_ranks_finite
        elements = {parameter: range(0) for bucket in gradients.buckets for parameter in bucket.parameters}
        for bucket in gradients.buckets:
            elements |= {bucket.parameters[piece.index]: piece.elements for piece in bucket.own}
        cut_into_pieces(optimizer, elements)
        self._elements: dict[Tensor, range] = dict(elements.items())
        self._pieces: dict[Tensor, nn.Parameter] = {**optimizer.pieces}
        for parameter in elements.keys() - optimizer.pieces.keys():  # trainable, and not the optimizer's
            self._pieces[parameter] = make_piece(parameter, elements[parameter])
        for bucket in gradients.buckets:
            bucket.pieces = self._pieces
        layers = {layer.weight: layer for layer in gradients.model.modules() if isinstance(layer, Float8Linear)}
        self._residuals = [
            ShardedResidual(optimizer.quantized[self._pieces[parameter]], layers.get(parameter), bucket, index)
            for bucket in gradients.buckets
            for index, parameter in enumerate(bucket.parameters)
            if self._pieces[parameter] in optimizer.quantized
        ]
        self._places: dict[Tensor, tuple[Bucket, int]] = {
            parameter: (bucket, index) for bucket in gradients.buckets for index, parameter in enumerate(bucket.parameters)
        }
        places = {self._pieces[parameter]: place for parameter, place in self._places.items()}
        matrices: dict[Tensor, tuple[Bucket, int]] = {
            piece: places[piece] for piece in optimizer.pieces.values() if optimizer.origins[piece].matrix_shape
        }
        if matrices:
            optimizer.matrices = _GatheredMatrices(optimizer, self.axis, matrices)
        for parameter in elements:
            if is_float8_weight(parameter):
                parameter.state.read_whole = _Read(self, parameter)
        self._is_owned: dict[Axis, Tensor] = {}  # of each quantized weight; made once, since making it waits for the device
        self._keeps_pieces = False
        self.blocks: ShardedBlocks | None = None
        """The blocks whose weights are divided as well, at stage 3."""
        optimizer.all_ranks_finite = self._all_ranks_finite
        optimizer.register_state_dict_post_hook(self._make_whole)

    @torch.no_grad()
    def shard_blocks(self, divided: Divided, sent_dtype: torch.dtype) -> None:
        """Divide weights, too; a bucket holds these weights or others. sent_dtype: in which fp32 weights travel."""
        buckets = [bucket for bucket in self.gradients.buckets if bucket.parameters[0] in divided.homes]
        self.blocks = ShardedBlocks(divided, buckets, self.optimizer.quantized, self.gradients, sent_dtype)

    def piece_of(self, parameter: Tensor) -> tuple[nn.Parameter, range] | None:
        """Return what this rank steps of a parameter, 1-D, and which elements these are; None for a frozen parameter."""
        return (self._pieces[parameter], self._elements[parameter]) if parameter in self._pieces else None

    @torch.no_grad()
    def values(self, parameter: Tensor) -> Tensor:
        """Return all values of a parameter, as precisely as the ranks hold them. All ranks call it together."""
        if parameter not in self._pieces or (is_float8_weight(parameter) and parameter.state.wide is not None):
            return OwnParameters().values(parameter)
        piece, is_gathered = self._pieces[parameter], self._is_whole(parameter)
        weight = self.optimizer.quantized.get(piece)
        if weight is not None and (weight.needs_master or weight.weight.state.own_residual is not None):
            master = self.optimizer.state.get(piece, {}).get("master_weights") if weight.needs_master else None
            own = (
                weight.values()
                if master is None
                else decode_values(master["codes"], master["dequant_scale"], None, torch.float32)
            )
            return self._joined(parameter, own)
        if is_gathered:
            return OwnParameters().values(parameter)
        joined = self._joined(parameter, piece.detach())
        if not is_float8_weight(parameter):
            return joined
        return decode_values(joined, parameter.dequant_scale, parameter.residual, torch.float32)

    def codes(self, weight: Float8Weight) -> Tensor:
        """Return all codes of a weight. All ranks call it together."""
        return weight.codes.detach() if self._is_whole(weight) else self._joined(weight, self._pieces[weight].detach())

    def _is_whole(self, parameter: Tensor) -> bool:
        """Return True if every rank has the whole parameter between passes."""
        return self.blocks is None or parameter not in self.blocks.parameters

    def _joined(self, parameter: Tensor, own: Tensor) -> Tensor:
        bucket, index = self._places[parameter]
        return bucket.join_pieces(index, own.reshape(-1), 1).view(parameter.shape)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients so that their norm is at most max_norm, as torch's function of the name. Returns the norm, fp32 ().

        Squares are summed in float64, so that the norm hardly depends on how gradients are cut.
        """
        held: dict[Tensor, Tensor] = dict(self._pieces)
        held |= {parameter: parameter for parameter in self.gradients.model.parameters() if parameter not in held}
        gradients = {parameter: piece.grad for parameter, piece in held.items() if piece.grad is not None}
        return clip_together(gradients, max_norm, self.counts, self.owners)

    @torch.no_grad()
    def publish(self) -> None:
        """Give every rank the weights, and scales, that the ranks have stepped. ValueError if a parameter has other memory."""
        divided: Container[Tensor] = ()
        if self.blocks is not None:
            self.blocks.release()
            self.blocks.forget_calls()
            self.blocks.check()
            divided = self.blocks.parameters
        for parameter, piece in self._pieces.items():
            if parameter not in divided and not shares_memory(piece, parameter, self._elements[parameter].start):
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} has other memory than when the model was made parallel; "
                    "a move to another device, or load_state_dict(assign=True), does that. Make the model parallel after it."
                )
        for residual in self._residuals:
            residual.follow_layer()
        self._drop_written()
        self._agree_on_scales()
        in_turn(self._gather_weights(bucket, bucket.parameters[0] not in divided) for bucket in self.gradients.buckets)

    def state_dicts_in_pieces(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state dicts of model and optimizer, with a `TensorInPieces` for each divided tensor.

        All ranks call it together.

        The host waits for nothing, so the number of skipped steps is a `DeferredValue`.
        """
        self._keep_pieces(True)
        try:
            optimizer = self.optimizer.late_state_dict()
        finally:
            self._keep_pieces(False)
        return self.model_in_pieces(), optimizer

    def model_in_pieces(self) -> dict[str, Any]:
        """Return the model's part of `state_dicts_in_pieces`. No rank waits for another."""
        self._keep_pieces(True)
        try:
            model = exact_state_dict(self.gradients.model, keep_vars=True)
        finally:
            self._keep_pieces(False)
        places = {
            stored(parameter): (bucket, index)
            for bucket in self.gradients.buckets
            for index, parameter in enumerate(bucket.parameters)
        }
        for name, held in model.items():
            if isinstance(held, Tensor):
                is_shared = held in places
                model[name] = self._described(*places[held], held) if is_shared else held.detach()
        residuals: dict[Tensor, Any] = {residual.weight.weight: residual.describe_piece() for residual in self._residuals}
        for name, layer in self.gradients.model.named_modules(remove_duplicate=False):
            if isinstance(layer, Float8Linear) and residuals.get(layer.weight) is not None:
                model[f"{name}.weight_residual".removeprefix(".")] = residuals[layer.weight]
        return model

    def _described(self, bucket: Bucket, index: int, held: Tensor) -> TensorInPieces:
        return bucket.describe_piece(index, self._pieces[bucket.parameters[index]], 1, tuple(held.shape))

    def _keep_pieces(self, is_on: bool) -> None:
        self._keeps_pieces = is_on
        if self.blocks is not None:
            self.blocks.is_saving_pieces = is_on
        for residual in self._residuals:
            residual.stays_in_pieces = is_on

    def _drop_written(self) -> None:
        """End what is left of writes from outside: the step took over what this rank stepped, and others step the rest."""
        for parameter, piece in self._pieces.items():
            if is_float8_weight(parameter) and parameter.state.wide is not None:
                if len(self._elements[parameter]):
                    self.optimizer.follow_weight(piece)
                parameter.state.wide = None

    def _agree_on_scales(self) -> None:
        """Give each quantized weight the amax and the scale that its owners have written; NaN where one is not finite."""
        by_axis: dict[Axis, list[QuantizedWeight]] = {}
        for bucket in self.gradients.buckets:
            pieces = (self._pieces[parameter] for parameter in bucket.parameters)
            weights = [self.optimizer.quantized[piece] for piece in pieces if piece in self.optimizer.quantized]
            by_axis.setdefault(self.stage or bucket.axis, []).extend(weights)
        for axis, weights in by_axis.items():
            if not weights:
                continue
            device = weights[0].amax.device
            if axis not in self._is_owned or self._is_owned[axis].device != device:
                self._is_owned[axis] = torch.tensor([weight.codes.numel() > 0 for weight in weights], device=device)
            agree_on_weight_scales(self.optimizer, weights, self._is_owned[axis], axis)

    def _gather_weights(self, bucket: Bucket, wants_weights: bool) -> Iterator[None]:
        """Gather the bucket's weights if wanted, and residuals that ranks hold whole. A `yield` leaves gathers under way."""
        held: list[Sequence[Tensor | None]] = [[self._residual(parameter) for parameter in bucket.parameters]]
        if all(residual is None for residual in held[0]):
            held = []
        if wants_weights:
            held.append([stored(parameter).detach() for parameter in bucket.parameters])
        gathers = [_start_gather(bucket, whole) for whole in held]
        yield
        for whole, gather in zip(held, gathers, strict=True):
            for rank, share_S in enumerate(gather.wait()):
                for piece in bucket.layout.pieces(rank) if rank != bucket.axis.rank else ():
                    tensor = whole[piece.index]
                    if tensor is not None:
                        _elements(tensor, piece).copy_(share_S[piece.in_share])

    def _residual(self, parameter: Tensor) -> Tensor | None:
        """Return the whole residual of a weight, where every rank holds it."""
        weight = self.optimizer.quantized.get(self._pieces[parameter])
        return None if weight is None else weight.weight.residual

    def _all_ranks_finite(self, finite: Tensor) -> Tensor:
        finite = finite if self._own_finite is None else self._own_finite(finite)
        return agree_on_finite(self.owners, finite)

    @torch.no_grad()
    def _make_whole(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Put the whole parameters' states in the place of the pieces' states: on the host, since they may not fit a device.

        Where pieces are kept, put their places in it instead.
        """
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = {piece: number for number, piece in enumerate(held)}
        states = state_dict["state"]
        for bucket in self.gradients.buckets:
            for index, parameter in enumerate(bucket.parameters):
                number = numbers.get(self._pieces[parameter])
                if number in states:
                    states[number] = self._whole_state(bucket, index, states[number])

    def _whole_state(self, bucket: Bucket, index: int, state: dict[str, Any]) -> dict[str, Any]:
        owns_some = any(piece.index == index for piece in bucket.own)
        whole: dict[str, Any] = {}
        for name, value in state.items():
            if isinstance(value, dict):
                whole[name] = {part: self._join(bucket, index, part, held, owns_some) for part, held in value.items()}
            else:  # the number of steps: a rank that owns nothing has taken none
                steps = self._of_owners(bucket, torch.as_tensor(value, dtype=torch.float64), owns_some)
                whole[name] = self._kept_or_on_host(steps.to(value.dtype)) if isinstance(value, Tensor) else int(steps)
        return whole

    def _join(self, bucket: Bucket, index: int, part: str, held: Tensor, owns_some: bool) -> Tensor | TensorInPieces:
        """Return a part of a state, codes or scales, of all ranks' pieces of a parameter."""
        if held.dim() == 0:
            scale = self._of_owners(bucket, held, owns_some)
            return self._kept_or_on_host(torch.where(scale.isfinite(), scale, torch.nan))
        elements_per_number = 1 if part == "codes" else BLOCK
        if self._keeps_pieces:
            return bucket.describe_piece(index, held, elements_per_number)
        return bucket.join_pieces(index, held, elements_per_number).cpu()

    def _kept_or_on_host(self, number: Tensor) -> Tensor:
        """Return a number of a whole state on the host, unless a checkpoint copies it there with the pieces."""
        return number if self._keeps_pieces else number.cpu()

    def _of_owners(self, bucket: Bucket, number: Tensor, owns_some: bool) -> Tensor:
        """Return the number, which is not negative, that all owners of a parameter have; infinity for NaN."""
        own = number.to(bucket.axis.device, copy=True)
        return bucket.axis.max_(own if owns_some else torch.zeros_like(own))


class _GatheredMatrices:
    """Gathers matrices that ranks hold in pieces, for a rule that needs them whole (`SharedMatrices`)."""

    def __init__(self, optimizer: LowBitOptimizer, axis: Axis, places: Mapping[Tensor, tuple[Bucket, int]]) -> None:
        """axis: the ranks that hold the pieces. places: the bucket of each matrix's piece, and its index there."""
        self._optimizer, self._axis, self._places = optimizer, axis, places

    def due(self, updates: list[tuple[Tensor, Group]]) -> list[tuple[Tensor, Group]]:
        """Return updates with each matrix that some rank has a gradient of, in the order of the groups. The host waits."""
        groups = self._optimizer.param_groups  # others since a state dict was loaded
        matrices = [(piece, group) for group in groups for piece in group["params"] if piece in self._places]
        have_some, device = [piece.grad is not None for piece, _ in matrices], self._axis.device
        marks = torch.tensor(have_some, dtype=torch.float32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        is_due = self._axis.max_(marks).tolist()
        due = [update for update, mark in zip(matrices, is_due, strict=True) if mark]
        return [*(update for update in updates if update[0] not in self._places), *due]

    def join(self, piece: Tensor, own: Tensor) -> Tensor:
        """Return the whole matrix, 1-D."""
        bucket, index = self._places[piece]
        return bucket.join_pieces(index, own, 1)


class _Read:
    """`ShardedStates.values`, which a weight can hold without keeping the ranks' machinery alive."""

    def __init__(self, sharded: ShardedStates, weight: Float8Weight) -> None:
        self._sharded, self._weight = ref(sharded), ref(weight)

    def __call__(self) -> Tensor:
        sharded, weight = self._sharded(), self._weight()
        assert weight is not None
        return weight.dequantize() if sharded is None else sharded.values(weight)


def _start_gather(bucket: Bucket, whole: Sequence[Tensor | None]) -> Pending:
    """Start to gather the ranks' shares of the bucket's tensors, which all have one dtype."""
    some = next(tensor for tensor in whole if tensor is not None)
    own_S = some.new_zeros(bucket.layout.share_size)
    for piece in bucket.own:
        tensor = whole[piece.index]
        if tensor is not None:
            own_S[piece.in_share] = _elements(tensor, piece)
    return bucket.axis.start_gather(own_S)


def _elements(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a piece's elements of its whole tensor, as a view."""
    return tensor.view(-1)[piece.first : piece.first + piece.length]


# The residual of a weight in FP8, divided over the ranks: only the optimizer reads it, so each rank holds its own piece.
#
# A layer that reads its residual, because it multiplies in bf16 or with scales of blocks, keeps the whole on every rank.


class ShardedResidual:
    """The residual of one weight of a bucket. Without a residual, or where the layer reads it, nothing is divided."""

    def __init__(self, weight: QuantizedWeight, layer: Float8Linear | None, bucket: Bucket, index: int) -> None:
        """weight: this rank's piece, maybe of no elements. layer: that holds it. index: the parameter's, in the bucket."""
        self.weight, self._layer, self.bucket, self.index = weight, layer, bucket, index
        self.stays_in_pieces = False
        """True while state dicts leave the residual out; whoever writes pieces sets it, and sets it back."""
        self._divide()

    def describe_piece(self) -> TensorInPieces | None:
        """Return this rank's piece for a checkpoint; None where the layer holds the whole, or there is no residual."""
        layer, own = self._layer, self.weight.weight.state.own_residual
        if layer is None or own is None or layer.whole_residual is None:
            return None
        return self.bucket.describe_piece(self.index, own, 1, tuple(layer.weight.shape))

    def follow_layer(self) -> None:
        """Put the residual together for good if the layer reads it by now: it was demoted. All ranks call it together."""
        layer = self._layer
        if layer is not None and layer.whole_residual is not None and layer.reads_residual:
            with self.whole():
                pass

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the layer holds the whole residual. All ranks enter together."""
        weight, own = self.weight.weight, self.weight.weight.state.own_residual
        assert own is not None
        weight.hold_codes(weight.codes, self.bucket.join_pieces(self.index, own, 1).view(weight.shape))
        try:
            yield
        finally:
            self._divide()

    def _divide(self) -> None:
        """Keep the own piece of the layer's residual, if the layer does not read it."""
        layer, weight = self._layer, self.weight.weight
        if layer is None or weight.residual is None:
            return
        if layer.reads_residual:
            weight.state.own_residual = layer.whole_residual = None
            return
        with sliceable(weight.residual) as whole:
            weight.state.own_residual = self.weight.select(whole).clone()
        weight.hold_codes(weight.codes, None)
        layer.whole_residual = _Whole(self)


class _Whole:
    """`ShardedResidual.whole`, which does not follow a layer into a copy."""

    def __init__(self, residual: ShardedResidual) -> None:
        self._residual = residual

    def __call__(self) -> AbstractContextManager[None]:
        return nullcontext() if self._residual.stays_in_pieces else self._residual.whole()

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            "the residuals of this model's weights are divided over the ranks (ZeRO); allowed: copies of models "
            "that hold them. Load state_dict(), called by all ranks together, into a new model."
        )

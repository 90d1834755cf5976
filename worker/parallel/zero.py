"""ZeRO: a rank holds optimizer states, master weights and residuals of its share of each bucket, and steps it.

A rank's share is even to the element and may hold parts of tensors. Gradients arrive as means of the own share alone; after the
step the ranks agree on the weights' scales and gather each other's new weights as they are stored: as codes where the level
holds codes. Every rank has the whole weights in between, at stage 3 except those of blocks (`blocks.py`). A step gives the
bits that it gives without sharding: the same elements are rounded at the same places with the same random numbers. Only the
norm is summed in another order (in float64).

`optimizer.state_dict()` is that of the whole optimizer, on every rank; all ranks call it together. `load_state_dict` takes the
same, saved at any number of ranks. For checkpoints, `state_dicts_in_pieces` puts nothing together.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from worker.fp8.linear import Float8Linear
from worker.kernels.formats import BLOCK
from worker.mesh import Axis, Pending, TensorInPieces
from worker.optim import LowBitOptimizer
from worker.optim.pieces import cut_into_pieces, make_piece, shares_memory
from worker.parallel.blocks import DividedBlocks
from worker.parallel.buckets import Bucket
from worker.parallel.data_parallel import GradientBuckets, in_turn
from worker.parallel.entries import in_pieces, join
from worker.parallel.layout import Piece
from worker.parallel.norm import clip_together
from worker.parallel.residuals import ShardedResidual
from worker.parallel.scales import agree_on_scales, all_finite_on
from worker.parallel.tensor import TensorShards


class ShardedStates:
    """The optimizer of one rank, which steps the rank's pieces of all trainable parameters."""

    def __init__(self, optimizer: LowBitOptimizer, gradients: GradientBuckets, shards: TensorShards, stage: Axis) -> None:
        """Cut the optimizer's states, and let the buckets deliver to pieces. ValueError if a parameter is not contiguous.

        stage: the ranks that together hold these layers, by pieces of the shards: they agree on scales, norms, skipped steps.
        """
        self.optimizer, self.gradients, self.axis = optimizer, gradients, gradients.axis
        self.shards, self.stage = shards, stage
        self.whole, self.counts = stage, shards.counts
        """The ranks that agree on norms and skipped steps: with a pipeline more than `stage`. Whether a parameter counts."""
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
        self._residuals = [
            ShardedResidual(optimizer._quantized[self._pieces[parameter]], bucket, index)
            for bucket in gradients.buckets
            for index, parameter in enumerate(bucket.parameters)
            if self._pieces[parameter] in optimizer._quantized
        ]
        self._is_owned: Tensor | None = None  # of each quantized weight; made once, since making it waits for the device
        self._keeps_pieces = False
        self.blocks: DividedBlocks | None = None
        """At stage 3, the blocks whose weights are divided as well."""
        optimizer.all_ranks_finite = self._all_ranks_finite
        optimizer.register_state_dict_post_hook(self._make_whole)

    @torch.no_grad()
    def divide_blocks(self, blocks: Sequence[nn.Module], divided: Mapping[Tensor, int], sent_dtype: torch.dtype) -> None:
        """Divide weights, too. divided: each with the index of its block; buckets hold these or others.

        sent_dtype: in which fp32 weights travel.
        """
        buckets = [bucket for bucket in self.gradients.buckets if bucket.parameters[0] in divided]
        self.blocks = DividedBlocks(blocks, buckets, self.optimizer._quantized, self.axis, sent_dtype)

    def piece_of(self, parameter: Tensor) -> tuple[nn.Parameter, range] | None:
        """Return what this rank steps of a parameter, 1-D, and which elements these are; None for a frozen parameter."""
        return (self._pieces[parameter], self._elements[parameter]) if parameter in self._pieces else None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients so that their norm is at most max_norm, as torch's function of the name. Returns the norm, fp32 ().

        Squares are summed in float64, so that the norm hardly depends on how gradients are cut.
        """
        gradients = {parameter: piece.grad for parameter, piece in self._pieces.items() if piece.grad is not None}
        return clip_together(gradients, max_norm, self.counts, self.whole)

    @torch.no_grad()
    def publish(self) -> None:
        """Give every rank the weights, and scales, that the ranks have stepped. ValueError if a parameter has other memory."""
        divided: Container[Tensor] = ()
        if self.blocks is not None:
            self.blocks.release()
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
        self._agree_on_scales()
        in_turn(self._gather_weights(bucket, bucket.parameters[0] not in divided) for bucket in self.gradients.buckets)

    def state_dicts_in_pieces(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state dicts of model and optimizer, with a `TensorInPieces` for what ranks share. All ranks call it together.

        The host waits for nothing, so the number of skipped steps is `Late`.
        """
        self._keep_pieces(True)
        try:
            optimizer = self.optimizer.late_state_dict()
        finally:
            self._keep_pieces(False)
        return self.model_in_pieces(), optimizer

    def model_in_pieces(self) -> dict[str, Any]:
        """The model's part of `state_dicts_in_pieces`, for which no rank waits for another."""
        self._keep_pieces(True)
        try:
            model: dict[str, Any] = self.gradients.model.state_dict(keep_vars=True)
        finally:
            self._keep_pieces(False)
        places: dict[Tensor, tuple[Bucket, int]] = {
            parameter: (bucket, index) for bucket in self.gradients.buckets for index, parameter in enumerate(bucket.parameters)
        }
        for name, held in model.items():
            if isinstance(held, Tensor):
                is_shared = held in places
                model[name] = in_pieces(*places[held], self._pieces[held], 1, tuple(held.shape)) if is_shared else held.detach()
        residuals = {residual.weight.holder: residual.in_pieces() for residual in self._residuals}
        for name, layer in self.gradients.model.named_modules(remove_duplicate=False):
            if isinstance(layer, Float8Linear) and residuals.get(layer) is not None:
                model[f"{name}.weight_residual".removeprefix(".")] = residuals[layer]
        return model

    def _keep_pieces(self, is_on: bool) -> None:
        self._keeps_pieces = is_on
        if self.blocks is not None:
            self.blocks.is_saving_pieces = is_on
        for residual in self._residuals:
            residual.stays_in_pieces = is_on

    def _agree_on_scales(self) -> None:
        """Give each quantized weight the amax and the scale that its owners have written; NaN where one is not finite."""
        pieces = [self._pieces[parameter] for bucket in self.gradients.buckets for parameter in bucket.parameters]
        weights = [self.optimizer._quantized[piece] for piece in pieces if piece in self.optimizer._quantized]
        if not weights:
            return
        device = weights[0].amax.device
        if self._is_owned is None or self._is_owned.device != device:
            self._is_owned = torch.tensor([weight.codes.numel() > 0 for weight in weights], device=device)
        agree_on_scales(self.optimizer, weights, self._is_owned, self.stage)

    def _gather_weights(self, bucket: Bucket, wants_weights: bool) -> Iterator[None]:
        """Gather the bucket's weights if wanted, and residuals of which ranks hold the whole. Each `yield` leaves a gather."""
        held: list[Sequence[Tensor | None]] = [[self._residual(parameter) for parameter in bucket.parameters]]
        if all(residual is None for residual in held[0]):
            held = []
        if wants_weights:
            held.append([parameter.detach() for parameter in bucket.parameters])
        gathers = [_start_gather(bucket, whole) for whole in held]
        yield
        for whole, gather in zip(held, gathers, strict=True):
            for rank, share_S in enumerate(gather.wait()):
                for piece in bucket.layout.pieces(rank) if rank != self.axis.rank else ():
                    tensor = whole[piece.index]
                    if tensor is not None:
                        _elements(tensor, piece).copy_(share_S[piece.in_share])

    def _residual(self, parameter: Tensor) -> Tensor | None:
        """The whole residual of a weight, where every rank holds it."""
        weight = self.optimizer._quantized.get(self._pieces[parameter])
        return None if weight is None else weight.holder.weight_residual

    def _all_ranks_finite(self, finite: Tensor) -> Tensor:
        finite = finite if self._own_finite is None else self._own_finite(finite)
        return all_finite_on(self.whole, finite)

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
                whole[name] = {part: self._join(bucket, index, part, entries, owns_some) for part, entries in value.items()}
            else:  # the number of steps: a rank that owns nothing has taken none
                steps = self._of_owners(torch.as_tensor(value, dtype=torch.float64), owns_some)
                whole[name] = self._as_told(steps.to(value.dtype)) if isinstance(value, Tensor) else int(steps)
        return whole

    def _join(self, bucket: Bucket, index: int, part: str, entries: Tensor, owns_some: bool) -> Tensor | TensorInPieces:
        """The entries of a part of a state, of all ranks' pieces of a parameter."""
        if entries.dim() == 0:
            scale = self._of_owners(entries, owns_some)
            return self._as_told(torch.where(scale.isfinite(), scale, torch.nan))
        elements_per_entry = 1 if part == "codes" else BLOCK
        if self._keeps_pieces:
            return in_pieces(bucket, index, entries, elements_per_entry)
        return join(bucket, index, entries, elements_per_entry).cpu()

    def _as_told(self, number: Tensor) -> Tensor:
        """A number of a whole state: on the host, unless a checkpoint copies it there with the pieces."""
        return number if self._keeps_pieces else number.cpu()

    def _of_owners(self, number: Tensor, owns_some: bool) -> Tensor:
        """The number, which is not negative, that all owners of a parameter have; infinity for NaN."""
        own = number.to(self.axis.device, copy=True)
        return self.axis.max_(own if owns_some else torch.zeros_like(own))


def _start_gather(bucket: Bucket, whole: Sequence[Tensor | None]) -> Pending:
    """Start to gather the ranks' shares of the bucket's tensors, all of one dtype."""
    some = next(tensor for tensor in whole if tensor is not None)
    own_S = some.new_zeros(bucket.layout.share_size)
    for piece in bucket.own:
        tensor = whole[piece.index]
        if tensor is not None:
            own_S[piece.in_share] = _elements(tensor, piece)
    return bucket.axis.start_gather(own_S)


def _elements(tensor: Tensor, piece: Piece) -> Tensor:
    """A piece's elements of its whole tensor, as a view."""
    return tensor.view(-1)[piece.first : piece.first + piece.length]

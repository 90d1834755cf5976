"""The residual of a weight in FP8, divided over the ranks: only the optimizer reads it, so each rank holds its own piece.

A layer that reads its residual, because it multiplies in bf16 or with scales of blocks, keeps the whole on every rank.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NoReturn

from octet.worker.common.deferred import sliceable
from octet.worker.fp8.linear import Float8Linear
from octet.worker.mesh import TensorInPieces
from octet.worker.optim import QuantizedWeight
from octet.worker.parallel.buckets import Bucket


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

"""The weights of one bucket at ZeRO stage 3: a rank's share for good, and the whole in memory that comes and goes.

The whole is one storage for the life of the model, which is emptied and filled. So views that autograd has saved, a transposed
one for example, see the values again in the backward pass.
"""

from collections.abc import Mapping
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from octet.worker.common.deferred import is_deferred
from octet.worker.fp8.weight import hold, is_float8_weight, stored
from octet.worker.kernels.torch_private import key_of_storage, set_version, version_of
from octet.worker.mesh import Axis, Pending
from octet.worker.optim import QuantizedWeight
from octet.worker.parallel.buckets import Bucket


class GatheredBucket:
    """Parameters that are stored alike. They are released when it is made.

    Shape suffixes: R ranks, S elements of one rank's share.
    """

    def __init__(
        self, bucket: Bucket, quantized: Mapping[Tensor, QuantizedWeight], axis: Axis, sent_dtype: torch.dtype
    ) -> None:
        """The bucket's pieces move into the share, which is zeros where parameters have no memory yet.

        quantized: weights held as codes, by piece. sent_dtype: in which fp32 weights travel; bf16 rounds them, on the rank that
        owns them too.
        """
        self.bucket, self.axis = bucket, axis
        first = stored(bucket.parameters[0])
        shape = (axis.size, bucket.layout.share_size)
        has_values = not is_deferred(first)
        self._whole_RS = first.detach().new_zeros(shape) if has_values else first.detach().new_empty(shape)
        self._bound = [bucket.view_of(self._whole_RS.view(-1), index) for index in range(len(bucket.parameters))]
        for whole, parameter in zip(self._bound, bucket.parameters, strict=True) if has_values else ():
            whole.copy_(stored(parameter).detach())
        self.share_S = self._whole_RS[axis.rank].clone() if has_values else first.detach().new_zeros(shape[1])
        assert bucket.pieces is not None
        for index, parameter in enumerate(bucket.parameters):
            bucket.pieces[parameter].data = self.share_S[:0]
            if is_float8_weight(parameter):
                parameter.state.after_write = partial(_keep, ref(self), index)
        for piece in bucket.own:
            bucket.pieces[bucket.parameters[piece.index]].data = self.share_S[piece.in_share]
        pieces = [bucket.pieces[parameter] for parameter in bucket.parameters]
        self._quantized = [quantized[piece] for piece in pieces if piece in quantized]
        self._sent_dtype = sent_dtype if first.dtype == torch.float32 else first.dtype
        self._num_bytes = self._whole_RS.untyped_storage().nbytes()
        self._released = [_placeholder(stored(parameter)) for parameter in bucket.parameters]
        self._pending: Pending | None = None
        self._is_bound, self.version_before = True, 0
        self.release()

    @property
    def is_away(self) -> bool:
        """True if the whole is neither there nor on its way."""
        return not self._is_bound and self._pending is None

    def start(self) -> None:
        """Start to gather, unless the whole is there, or on its way."""
        if not self.is_away:
            return
        self._whole_RS.untyped_storage().resize_(self._num_bytes)
        self.version_before = version_of(self._whole_RS)  # autograd has saved codes, which are gathered again
        if self._sent_dtype == self.share_S.dtype:
            self._pending = self.axis.start_gather(self.share_S, self._whole_RS)
        else:
            self._pending = self.axis.start_gather(self.share_S.to(self._sent_dtype))

    def bind(self) -> None:
        """Wait for what was started, and let the parameters be the whole."""
        if self._pending is None:
            return
        gathered_RS, self._pending = self._pending.wait(), None
        if gathered_RS is not self._whole_RS:
            self._whole_RS.copy_(gathered_RS)
        set_version(self._whole_RS, self.version_before)
        self._is_bound = True
        for parameter, whole in zip(self.bucket.parameters, self._bound, strict=True):
            hold(parameter, whole)

    def release(self) -> None:
        """Free the whole. The parameters keep shape and dtype, and read as NaN."""
        if self._pending is not None:
            self._pending.wait()  # the backend still writes
            self._pending = None
        for parameter, released in zip(self.bucket.parameters, self._released, strict=True) if self._is_bound else ():
            hold(parameter, released)
        self._is_bound = False
        self._whole_RS.untyped_storage().resize_(0)

    def keep_share(self) -> None:
        """Keep the own share of a whole that was loaded."""
        self.share_S.copy_(self._whole_RS[self.axis.rank])
        for weight in self._quantized:
            weight.note_whole_codes()

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor lies in the memory of the whole."""
        return key_of_storage(tensor.untyped_storage()) == key_of_storage(self._whole_RS.untyped_storage())

    def keep_written(self, index: int) -> None:
        """Keep the own elements of a parameter that was written while the whole was there."""
        if self._is_bound:
            whole_S = self._whole_RS[self.axis.rank]
            for piece in self.bucket.own:
                if piece.index == index:
                    self.share_S[piece.in_share] = whole_S[piece.in_share]

    def check(self) -> None:
        """Raise ValueError if a parameter has other memory than it was released to."""
        for parameter, released in zip(self.bucket.parameters, self._released, strict=True):
            if not self._is_bound and stored(parameter).data_ptr() != released.data_ptr():
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} has other memory than when the model was made parallel; "
                    "a move to another device, or load_state_dict(assign=True), does that. Make the model parallel after it."
                )


def _keep(bucket: "ref[GatheredBucket]", index: int) -> None:
    """Call `keep_written` of a bucket that is still there."""
    held = bucket()
    if held is not None:
        held.keep_written(index)


def _placeholder(parameter: Tensor) -> Tensor:
    """Return one NaN in the parameter's shape and dtype, which takes the memory of one element."""
    return torch.full((1,), torch.nan, device=parameter.device).to(parameter.dtype).expand(parameter.shape)

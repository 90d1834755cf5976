"""Parameters whose gradients travel together, and how their means are computed.

Each rank receives its share of the bucket from all ranks, adds in the order of the ranks in fp32, and divides. FP8 gradients
travel as codes, and their mean is rounded once; the others travel in fp32, or in bf16. Then either the means are gathered, so
that every rank has the whole gradients, or each rank keeps the pieces that it owns (ZeRO). Pieces may add the means of several
backward passes, in fp32; the last one's sum is what is rounded. Results are the same, bit for bit, however parameters are
divided into buckets. A parameter without a gradient counts as zeros if another rank has one; without one on any rank it stays
without.

Shape suffixes: R ranks, S elements of one rank's share, G parameters of the bucket.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from octet.api_schemas.bucket_layout import BucketLayout, Piece
from octet.worker import kernels
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.kernels.formats import E4M3
from octet.worker.mesh import Axis, TensorInPieces


class Bucket(ABC):
    """Parameters whose gradients travel together. `average` runs once for each exchange.

    holds_sums: the pieces' gradients are sums over the step's earlier backward passes.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis) -> None:
        self.parameters, self.axis = parameters, axis
        self.layout = BucketLayout(tuple(parameter.numel() for parameter in parameters), axis.size)
        self.own = self.layout.pieces(axis.rank)
        self.pieces: Mapping[Tensor, nn.Parameter] | None = None
        """The holders of the means of this rank's share, by whole parameter. None: every rank receives all means."""
        self.missing = set(parameters)
        """Parameters whose gradients have not arrived since the last exchange."""
        self.holds_sums = False
        self.doubtful: list[tuple[nn.Parameter, Tensor]] = []
        """Parameters with a mean of zeros if no rank has had a gradient, each with the flag (): True if one has."""

    def settle(self, is_used: Iterable[bool]) -> None:
        """Take the mean back where no rank has had a gradient. is_used: the flags of `doubtful`, read by the host."""
        for (holder, _), has_gradient in zip(self.doubtful, is_used, strict=True):
            if not has_gradient:
                holder.grad = None
        self.doubtful = []

    @abstractmethod
    def average(self, *, is_last: bool = True) -> Iterator[None]:
        """Replace the gradients by their means. Each `yield` leaves a collective under way.

        is_last: of a step; the means of an earlier backward pass, which only a bucket of pieces takes, are added up.
        """

    def _take_gradients(self) -> list[Tensor | None]:
        """Return the gradients. In a bucket of pieces the parameters then hold none."""
        gradients = [parameter.grad for parameter in self.parameters]
        if self.pieces is not None:
            for parameter in self.parameters:
                parameter.grad = None
        return gradients

    def _sum_before(self, piece: Piece) -> Tensor | None:
        """Return the sum of the step's earlier means of a piece."""
        return self._owned(piece).grad if self.holds_sums else None

    def _doubt(self, gradients: Sequence[Tensor | None], marks_RG: Tensor) -> None:
        """Remember parameters without a gradient here; `settle` waits for the device. marks_RG: 0 where a rank has none.

        A piece that has a sum of earlier backward passes keeps it, with zeros added.
        """
        missing = {index for index, gradient in enumerate(gradients) if gradient is None}
        if self.pieces is None:
            holders = {index: self.parameters[index] for index in missing}
        else:
            without_sum = [piece for piece in self.own if self._sum_before(piece) is None]
            holders = {piece.index: self._owned(piece) for piece in without_sum if piece.index in missing}
        self.doubtful = [(holder, (marks_RG[:, index] != 0).any()) for index, holder in holders.items()]

    def _owned(self, piece: Piece) -> nn.Parameter:
        assert self.pieces is not None
        return self.pieces[self.parameters[piece.index]]

    def join_pieces(self, index: int, own: Tensor, elements_per_number: int) -> Tensor:
        """Put the ranks' pieces of a parameter's values, or of their scales, together: 1-D. All ranks call it together.

        index: the parameter's. elements_per_number: of the parameter, for each number of `own`: 128 for scales of blocks.
        """
        lengths = [length for _, length in self._places(index, elements_per_number)]
        padded = own.new_zeros(max(lengths))
        padded[: own.numel()] = own
        return torch.cat([share[:length] for share, length in zip(self.axis.start_gather(padded).wait(), lengths, strict=True)])

    def describe_piece(
        self, index: int, own: Tensor, elements_per_number: int, shape: tuple[int, ...] | None = None
    ) -> TensorInPieces:
        """Return this rank's piece of a parameter's values, or of their scales, with its place. shape: by default 1-D.

        Arguments as for `join_pieces`.
        """
        places = self._places(index, elements_per_number)
        num_numbers = sum(length for _, length in places)
        return TensorInPieces(own.detach(), (num_numbers,) if shape is None else shape, tuple(places))

    def view_of(self, flat: Tensor, index: int) -> Tensor:
        """Return one parameter's part of the gathered buffer, as a view in the parameter's shape."""
        offset, parameter = self.layout.offsets[index], self.parameters[index]
        return flat[offset : offset + parameter.numel()].view(parameter.shape)

    def _places(self, index: int, elements_per_number: int) -> list[tuple[int, int]]:
        """Return the first number of each rank's piece of a parameter, and how many it has."""
        places = []
        for rank in range(self.axis.size):
            held = next((piece.elements for piece in self.layout.pieces(rank) if piece.index == index), range(0))
            first = held.start // elements_per_number
            places.append((first, -(-held.stop // elements_per_number) - first))
        return places


class CodesBucket(Bucket):
    """FP8 gradients: codes travel, with one scale per gradient. A scale of 0 stands for no gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis, positions: Sequence[RoundingPosition]) -> None:
        super().__init__(parameters, axis)
        self.positions = positions

    def average(self, *, is_last: bool = True) -> Iterator[None]:
        gradients = [
            Float8Gradient.quantize(gradient, position)
            if gradient is not None and not isinstance(gradient, Float8Gradient)
            else gradient
            for gradient, position in zip(self._take_gradients(), self.positions, strict=True)
        ]
        sent_RS, scales_G = self._pack(gradients)
        exchange, scales = self.axis.start_exchange(sent_RS.view(E4M3.dtype)), self.axis.start_gather(scales_G)
        del sent_RS
        yield
        received_RS, scales_RG = exchange.wait(), scales.wait()
        self._doubt(gradients, scales_RG)
        means = [kernels.mean_of_shards(received_RS[:, piece.in_share], scales_RG[:, piece.index]) for piece in self.own]
        if self.pieces is not None:
            means = [self._add(piece, *mean) for piece, mean in zip(self.own, means, strict=True)]
            if not is_last:
                self._keep_sums([mean for mean, _ in means])
                return
        amaxes_G = torch.zeros_like(scales_G)
        for piece, (_, amax) in zip(self.own, means, strict=True):
            amaxes_G[piece.index] = amax
        self.axis.max_(amaxes_G)
        new_scales_G = kernels.finite_or_nan(amaxes_G, E4M3.dtype)
        own_codes = [
            kernels.quantize(mean, E4M3.dtype, amax=amaxes_G[piece.index])[0]
            for piece, (mean, _) in zip(self.own, means, strict=True)
        ]
        if self.pieces is not None:
            self._keep_codes(own_codes, new_scales_G)
            return
        share_S = torch.zeros(self.layout.share_size, dtype=torch.uint8, device=received_RS.device)
        for piece, codes in zip(self.own, own_codes, strict=True):
            share_S[piece.in_share] = codes.view(torch.uint8)
        gather = self.axis.start_gather(share_S.view(E4M3.dtype))
        del received_RS, means, own_codes
        yield
        flat = gather.wait().view(-1)
        for index, parameter in enumerate(self.parameters):
            mean = Float8Gradient(self.view_of(flat, index), new_scales_G[index], self.positions[index])
            parameter.grad = _written(gradients[index], mean)

    def _pack(self, gradients: Sequence[Float8Gradient | None]) -> tuple[Tensor, Tensor]:
        """Return the codes as bytes (R, S), and the scales (G)."""
        device = self.parameters[0].device
        sent = torch.zeros(self.layout.num_ranks * self.layout.share_size, dtype=torch.uint8, device=device)
        scales = [torch.zeros((), device=device)] * len(gradients)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.view_of(sent, index).copy_(gradient.codes.view(torch.uint8))
                scales[index] = gradient.dequant_scale.reshape(())
        return sent.view(self.layout.num_ranks, -1), torch.stack(scales)

    def _add(self, piece: Piece, mean: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of a step's means so far, and its amax."""
        before = self._sum_before(piece)
        if before is None:
            return mean, amax
        mean = mean.add_(before)
        return mean, kernels.compute_amax(mean)

    def _keep_sums(self, sums: Sequence[Tensor]) -> None:
        for piece, total in zip(self.own, sums, strict=True):
            self._owned(piece).grad = total
        self.holds_sums = True

    def _keep_codes(self, own_codes: Sequence[Tensor], scales_G: Tensor) -> None:
        for piece, codes in zip(self.own, own_codes, strict=True):
            mean = Float8Gradient(codes, scales_G[piece.index].clone(), self.positions[piece.index])
            self._owned(piece).grad = mean
        self.holds_sums = False


class WideBucket(Bucket):
    """Plain gradients: they travel in one dtype, whatever their own, and are added in fp32."""

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis, sent_dtype: torch.dtype = torch.float32) -> None:
        """sent_dtype: bf16 sends half the bytes; each rank's gradient is rounded once, and so is a mean that is gathered."""
        super().__init__(parameters, axis)
        self.sent_dtype = sent_dtype

    def average(self, *, is_last: bool = True) -> Iterator[None]:
        gradients = self._take_gradients()
        device = self.parameters[0].device
        sent = torch.zeros(self.layout.num_ranks * self.layout.share_size, dtype=self.sent_dtype, device=device)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.view_of(sent, index).copy_(gradient)
        # Filled on the device: a copy from a list would let the host wait inside of the backward pass.
        marks_G = torch.ones(len(gradients), dtype=torch.uint8, device=device)
        for index, gradient in enumerate(gradients):
            if gradient is None:
                marks_G[index].zero_()
        exchange = self.axis.start_exchange(sent.view(self.layout.num_ranks, -1))
        marks = self.axis.start_gather(marks_G)
        del sent
        yield
        received_RS = exchange.wait()
        mean_S = received_RS[0].to(torch.float32, copy=True)
        for rank in range(1, self.axis.size):
            mean_S += received_RS[rank]
        mean_S /= self.axis.size
        self._doubt(gradients, marks.wait())
        if self.pieces is not None:
            for piece in self.own:
                self._owned(piece).grad = self._added(piece, mean_S[piece.in_share])
            self.holds_sums = not is_last
            return
        gather = self.axis.start_gather(mean_S.to(self.sent_dtype))
        del received_RS
        yield
        flat = gather.wait().view(-1)
        for index, parameter in enumerate(self.parameters):
            mean = self.view_of(flat, index).to(gradient_dtype(parameter))
            parameter.grad = _written(gradients[index], mean)

    def _added(self, piece: Piece, mean: Tensor) -> Tensor:
        """Return the sum of a step's means so far, in the dtype of the gradient."""
        before = self._sum_before(piece)
        if before is not None:
            mean = mean + before
        return mean.to(gradient_dtype(self._owned(piece)))


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which the parameter's gradient presents itself: fp32 for one in FP8, which has no `grad_dtype`."""
    return parameter.grad_dtype or torch.float32


def _written(gradient: Tensor | None, mean: Tensor) -> Tensor:
    """Return the gradient with the mean's values, in the memory that it has; without a gradient, a copy of the mean."""
    if gradient is None and isinstance(mean, Float8Gradient):
        return Float8Gradient(mean.codes.clone(), mean.dequant_scale.clone(), mean.position)
    if gradient is None:
        return mean.clone()
    if isinstance(gradient, Float8Gradient) and isinstance(mean, Float8Gradient):
        gradient.codes.copy_(mean.codes)
        gradient.dequant_scale.copy_(mean.dequant_scale)
    else:
        gradient.copy_(mean)
    return gradient

"""Data parallel: every rank holds the whole model, and gradients become their means while the backward pass still computes.

A bucket of gradients is exchanged as soon as the last of them has arrived. All ranks launch the buckets in one order, whatever
arrives first: the reverse of the order in which the model names its parameters. A bucket that lacks a gradient waits for the
end of the backward pass, or for `finish`, and so do those after it. At stage 3 of ZeRO a block's buckets go in its turn of the
backward pass, with or without gradients, so that exchanges and gathers of weights have one order, too (`sharded_blocks.py`).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from octet.api_schemas.bucket_layout import MAX_ELEMENTS, fill_buckets
from octet.worker.fp8.gradient_hooks import has_new_gradient
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.weight import stored, tensors_in_memory
from octet.worker.kernels.torch_private import call_after_backward
from octet.worker.mesh import Axis, bound_exchange
from octet.worker.parallel.buckets import Bucket, CodesBucket, WideBucket

_DONE = object()


class GradientBuckets:
    """All gradients of a model, exchanged over an axis as they arrive. On an axis of one rank nothing happens."""

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        *,
        max_elements: int = MAX_ELEMENTS,
        wide_dtype: torch.dtype = torch.float32,
        homes: Mapping[Tensor, int] | None = None,
        axis_of: Callable[[Tensor], Axis] | None = None,
    ) -> None:
        """The trainable parameters are those of this moment. max_elements: of a bucket with several parameters.

        wide_dtype: in which gradients travel that are not in FP8. homes: where a parameter lies that stage 3 of ZeRO divides;
        no bucket holds parameters of two places, or of one and the rest. axis_of: returns the part of the axis whose ranks
        hold the same parameter, by default all of it; one that a single rank holds is in no bucket.
        """
        self.model, self.axis = model, axis
        self._trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
        axes = {parameter: axis if axis_of is None else axis_of(parameter) for parameter in self._trained}
        shared = {parameter: part for parameter, part in axes.items() if part is axis or part.size > 1}
        self.buckets = _make_buckets(model, shared, max_elements, wide_dtype, homes or {})
        self.syncs = True
        """True if gradients that arrive are exchanged."""
        self.finishes_itself = False
        """True if a backward pass that exchanges gradients also calls `finish`, before `backward` returns."""
        self.is_finished = False
        """True since the last `finish`, until `loop.py` sets it back."""
        self.after_finish: Callable[[], None] | None = None
        self.reduces_each_pass = False
        """True if gradients are exchanged inside `no_sync`, too; the owners of their pieces add them up (ZeRO 2)."""
        self.is_open: Callable[[Bucket], bool] = lambda _bucket: True
        """Returns True where a bucket may be exchanged as soon as it has its gradients. Stage 3 replaces it."""
        self._home: dict[Tensor, Bucket] = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self._has_arrivals = False
        self._settled: dict[tuple[nn.Parameter, ...], list[bool]] = {}
        """By the parameters without a gradient here, which of them have one elsewhere: as the passes of the last step said."""
        self._is_within_step = False
        self._num_passes = 0
        self._num_launched = 0
        self._under_way: list[Iterator[None]] = []
        if axis.size > 1:
            for exchanging in dict.fromkeys((axis, *(bucket.axis for bucket in self.buckets))):
                bound_exchange(exchanging)
            # A parameter holds its hooks where Python's collector cannot see them: a strong reference would free nothing.
            hook = partial(_arrive_at, weakref.ref(self))
            for parameter in self._home:
                parameter.register_post_accumulate_grad_hook(hook)

    @contextmanager
    def no_sync(self, is_on: bool = True) -> Iterator[None]:
        """Inside, gradients accumulate on their rank: for all micro-batches of a step but the last. Not if is_on is false.

        Under ZeRO 2 the owners of pieces accumulate: each backward pass inside is an exchange. All ranks have as many; one that
        has no gradient enters and leaves for itself.
        """
        before, self.syncs = self.syncs, self.syncs and not is_on
        num_passes = self._num_passes
        try:
            yield
        finally:
            self.syncs = before
        if is_on and before and self.reduces_each_pass and self._num_passes == num_passes:
            self._end_pass(is_last=False)

    @torch.no_grad()
    def finish(self) -> None:
        """Exchange what has not been exchanged, and wait until all gradients are means. Every rank calls it once per step.

        Raises ValueError if a parameter has a gradient that did not require one when the buckets were made.
        """
        if self.axis.size == 1:
            return
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and parameter not in self._trained:
                raise ValueError(
                    f"parameter {name!r} has a gradient and was frozen when the model was made parallel; allowed: parameters "
                    "that required gradients then. Unfreeze it before, and freeze it afterwards."
                )
        self._end_pass(is_last=True)
        self.is_finished = True
        if self.after_finish is not None:
            self.after_finish()

    @torch.no_grad()
    def launch_due(self, is_due: Callable[[Bucket], bool]) -> None:
        """Exchange the next buckets, as long as they are due, with the gradients that they have by now."""
        while self._num_launched < len(self.buckets) and is_due(self.buckets[self._num_launched]):
            self._begin_pass()
            self._launch(is_last=self.syncs)

    @torch.no_grad()
    def drop_interrupted_pass(self) -> None:
        """Forget a backward pass that an exception has ended; without one, do nothing. All ranks call it together.

        The ranks may have raised at different gradients, so each takes part in the rest of the exchange. The gradients are
        there then, for `zero_grad` to drop.
        """
        if not (self._has_arrivals or self._num_launched or self._under_way):
            return
        self._end_pass(is_last=True)

    @torch.no_grad()
    def _end_pass(self, *, is_last: bool) -> None:
        """Exchange what has not been exchanged of a backward pass, and wait for all of it."""
        if self.axis.size == 1:
            return
        while self._num_launched < len(self.buckets):
            self._launch(is_last=is_last)
        while self._under_way:
            self._advance()
        self._settle(is_last=is_last)
        self._num_launched = 0
        self._has_arrivals = False
        self._num_passes += 1
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)

    def _settle(self, *, is_last: bool) -> None:
        """Take means back where no rank has had a gradient: the one wait of the host for the device.

        A recorded pass cannot wait. It repeats what the last step said, and has to lack the same gradients as that.
        """
        doubtful = [pair for bucket in self.buckets for pair in bucket.doubtful]
        without = tuple(parameter for parameter, _ in doubtful)
        is_cuda = self.axis.device.type == "cuda" and torch.cuda.is_available()
        if not (is_cuda and torch.cuda.is_current_stream_capturing()):
            are_used = torch.stack([flag for _, flag in doubtful]).tolist() if doubtful else []
            self._settled = (self._settled if self._is_within_step else {}) | {without: are_used}
        elif without not in self._settled:
            raise RuntimeError(
                f"the pass has no gradients of {len(without)} parameters on this rank, and the passes before it lacked others; "
                "allowed in a recording: the same ones in each pass"
            )
        self._is_within_step = not is_last
        is_used = iter(self._settled[without])
        for bucket in self.buckets:
            bucket.settle(list(islice(is_used, len(bucket.doubtful))))

    def _end_backward(self) -> None:
        if self.syncs:
            self.finish()
        else:
            self._end_pass(is_last=False)

    @torch.no_grad()
    def _arrive(self, parameter: Tensor) -> None:
        is_exchanged = self.syncs or self.reduces_each_pass
        if not is_exchanged or not has_new_gradient(parameter):
            return
        bucket = self._home[parameter]
        self._begin_pass()
        if self.buckets.index(bucket) < self._num_launched:
            raise RuntimeError(
                f"a second gradient of a parameter of shape {tuple(parameter.shape)} arrived after its exchange; allowed: one "
                "per exchange. Use no_sync for all micro-batches but the last, and use_reentrant=False in checkpoint()."
            )
        if (
            bucket.pieces is not None
            and bucket.pieces[parameter].grad is not None
            and self.is_finished
            and self.finishes_itself
        ):
            raise RuntimeError(
                f"a second exchange of the gradient of shape {tuple(parameter.shape)} came before optimizer.step(); allowed "
                "under ZeRO: one. Use no_sync for all micro-batches but the last, or optimizer.zero_grad() to drop the first."
            )
        bucket.missing.discard(parameter)
        self.launch_due(lambda following: not following.missing and self.is_open(following))

    def _begin_pass(self) -> None:
        """See to it that a backward pass, which may have begun, ends its exchanges."""
        if not self._has_arrivals and (self.finishes_itself or not self.syncs):
            call_after_backward(self._end_backward)
        self._has_arrivals = True

    def _launch(self, *, is_last: bool) -> None:
        """Start the next bucket's exchange. What is under way goes one collective further, in one order on all ranks."""
        self._advance()
        average = self.buckets[self._num_launched].average(is_last=is_last)
        next(average)
        self._under_way.append(average)
        self._num_launched += 1

    def _advance(self) -> None:
        self._under_way = _advanced(self._under_way)


def _arrive_at(buckets: "weakref.ref[GradientBuckets]", parameter: Tensor) -> None:
    """Run the hook of a parameter's gradient. Raises RuntimeError where what exchanges gradients is gone."""
    present = buckets()
    if present is None:
        raise RuntimeError(
            f"a gradient of shape {tuple(parameter.shape)} arrived, and what parallelize returned was deleted, with the "
            "optimizer; no rank would get its mean. Keep one of them while the model trains."
        )
    present._arrive(parameter)


def in_turn(runs: Iterable[Iterator[None]]) -> None:
    """Take generators that yield with a collective under way to their ends, in one order on all ranks, with few under way."""
    under_way: list[Iterator[None]] = []
    for run in runs:
        under_way = _advanced(under_way)
        next(run)
        under_way.append(run)
    while under_way:
        under_way = _advanced(under_way)


def _advanced(runs: list[Iterator[None]]) -> list[Iterator[None]]:
    """Take each generator one step further; returns those that are not at their ends."""
    return [run for run in runs if next(run, _DONE) is not _DONE]


def broadcast_parameters(model: nn.Module, axis_of: Callable[[Tensor], Axis]) -> None:
    """Give the ranks that hold the same parameter or buffer that of the first of them, bit for bit. axis_of: returns them."""
    for tensor in tensors_in_memory(model):
        axis_of(tensor).broadcast_(tensor)


def _make_buckets(
    model: nn.Module,
    axes: Mapping[nn.Parameter, Axis],
    max_elements: int,
    wide_dtype: torch.dtype,
    homes: Mapping[Tensor, int],
) -> list[Bucket]:
    """Buckets of parameters that are stored alike, in the order in which a backward pass is expected to fill them.

    axes: the ranks that hold each parameter of a bucket. homes: of parameters whose buckets come first, since those of the rest
    wait for the end of the pass.
    """
    positions = {
        layer.weight: layer.gradient_position
        for layer in model.modules()
        if isinstance(layer, Float8Linear) and layer.gradient_position is not None
    }
    ordered = [parameter for parameter in reversed(list(model.parameters())) if parameter in axes]
    place = {parameter: index for index, parameter in enumerate(ordered)}
    kinds: dict[tuple[Axis, bool, torch.dtype, torch.device, int | None], list[nn.Parameter]] = {}
    for parameter in ordered:
        is_in_codes, dtype = parameter in positions, stored(parameter).dtype
        kind = (axes[parameter], is_in_codes, dtype, parameter.device, homes.get(parameter))
        kinds.setdefault(kind, []).append(parameter)
    buckets: list[Bucket] = []
    for (axis, is_in_codes, *_), parameters in kinds.items():
        for indices in fill_buckets([parameter.numel() for parameter in parameters], max_elements):
            held = parameters[indices.start : indices.stop]
            if is_in_codes:
                buckets.append(CodesBucket(held, axis, [positions[parameter] for parameter in held]))
            else:
                buckets.append(WideBucket(held, axis, wide_dtype))
    is_rest = {parameter: bool(homes) and parameter not in homes for parameter in ordered}
    return sorted(buckets, key=lambda bucket: (is_rest[bucket.parameters[0]], place[bucket.parameters[-1]]))

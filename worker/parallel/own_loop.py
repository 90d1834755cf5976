"""`Parallel` for loops of one's own: hooks of the optimizer do what the trainer of jobs calls.

A loop calls `backward` itself, or gives whole batches to `step`, which divides them into micro-batches and runs the same on
ranks that hold stages of the model (`staged_loop.py`).
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from worker.models.model import TrainedModel
from worker.parallel.axes import Axes
from worker.parallel.buckets import gradient_dtype
from worker.parallel.data_parallel import broadcast_parameters
from worker.parallel.degrees import Degrees
from worker.parallel.divided import DividedGradient
from worker.parallel.draws import OwnDraws
from worker.parallel.parallelize import Parallel
from worker.parallel.plans import Plan
from worker.parallel.scaling import share_scaling
from worker.parallel.staging import Inputs
from worker.parallel.tensor import cut_model
from worker.prepare import share_rounding

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""The mean loss () of a model's output and targets."""


class OwnLoop(Parallel):
    """`Parallel` for a loop that only calls `backward` and `optimizer.step`: all else happens in hooks."""

    num_micro_batches = 1
    is_first_stage = True
    """Whether this rank computes the model's first blocks."""
    is_last_stage = True
    """Whether this rank computes the model's output, and has the losses."""

    def hook(self, num_micro_batches: int) -> None:
        """Follow the optimizer from now on. num_micro_batches: of each batch that `step` gets."""
        self.num_micro_batches = num_micro_batches
        self.gradients.finishes_itself = True
        self.gradients.after_finish = self._mark_divided
        optimizer = self.optimizer
        optimizer.zero_grad = partial(self._zero_grad, optimizer.zero_grad)  # type: ignore[method-assign]  # it has no hooks
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def step(self, inputs: Inputs, targets: Tensor | None = None, loss_fn: LossFunction | None = None) -> Tensor | None:
        """Run the forward and backward passes of a batch, in micro-batches. Returns its mean loss on the last stage, fp32 ().

        Clipping and the optimizer's step come after it; several calls before these accumulate. All ranks but those of the data
        axis give the same batch. inputs: samples along dimension 0, a multiple of micro_batches. loss_fn: of a micro-batch's
        output and targets, on the last stage. Without it a language model of ours computes its own loss: inputs is then a batch
        of tensors as its `loss` takes it, weighted by "num_targets" where it has any.
        Raises ValueError for a batch that does not divide, and for a loss function that is missing or cannot be used.
        """
        batches = self.micro_batches(inputs, targets, loss_fn)
        divisors, losses = self._divisors(batches, loss_fn), []
        for index, (batch, own_targets) in enumerate(batches):
            with self.no_sync(index < len(batches) - 1), torch.enable_grad():
                loss = self._loss(batch, own_targets, loss_fn) / divisors[index]
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def evaluate(self, inputs: Inputs, targets: Tensor | None = None, loss_fn: LossFunction | None = None) -> Tensor | None:
        """Return the mean loss of a batch of any number of samples, fp32 (), on the last stage. Arguments as for `step`.

        It does not change the model's mode: call `model.eval()` before.
        """
        self._check(inputs, targets, loss_fn)
        return self._loss(inputs, targets, loss_fn)

    def micro_batches(
        self, inputs: Inputs, targets: Tensor | None, loss_fn: LossFunction | None
    ) -> list[tuple[Inputs, Tensor | None]]:
        """Divide a batch. Raises ValueError if it does not divide into as many micro-batches of one size."""
        size, number = self._check(inputs, targets, loss_fn), self.num_micro_batches
        if not size or size % number:
            raise ValueError(
                f"the batch has {size} samples and micro_batches is {number}; allowed: multiples of {number}, since all "
                "micro-batches have one size. Leave out the last batch of an epoch (drop_last=True), or change micro_batches."
            )
        own_targets = [None] * number if targets is None else targets.chunk(number)
        if isinstance(inputs, Tensor):
            return list(zip(inputs.chunk(number), own_targets, strict=True))
        parts = {name: held.chunk(number) for name, held in inputs.items()}
        return [({name: held[index] for name, held in parts.items()}, own_targets[index]) for index in range(number)]

    def clip_grad_norm_(self, max_norm: float = math.inf) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most max_norm. Returns the norm before, fp32 ()."""
        self._finish()
        return super().clip_grad_norm_(max_norm)

    def _check(self, inputs: Inputs, targets: Tensor | None, loss_fn: LossFunction | None) -> int:
        """The number of samples, which all tensors have."""
        if (loss_fn is None) != (targets is None):
            raise ValueError(
                f"got {'targets without loss_fn' if loss_fn is None else 'loss_fn without targets'}; allowed: both, or neither "
                "with a batch of a language model of ours, which computes its own loss. Pass both."
            )
        if loss_fn is None and not (isinstance(self.model, TrainedModel) and isinstance(inputs, Mapping)):
            found = f"a {type(inputs).__name__} for a {type(self.model).__name__}"
            raise ValueError(
                f"got {found} without loss_fn; allowed: a batch of tensors by name for a language model of ours, which "
                "computes its own loss. Pass targets and loss_fn."
            )
        if isinstance(inputs, Mapping) and not isinstance(self.model, TrainedModel):
            raise ValueError(
                f"inputs is a {type(inputs).__name__}; allowed for a {type(self.model).__name__}: one tensor. Pass one."
            )
        named = {"inputs": inputs} if isinstance(inputs, Tensor) else dict(inputs)
        named |= {} if targets is None else {"targets of loss_fn": targets}
        sizes = {name: held.shape[0] if held.dim() else 0 for name, held in named.items()}
        if len(set(sizes.values())) != 1:
            found = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(
                f"tensors of the batch have different numbers of samples: {found}; allowed: one. Change the batch."
            )
        return next(iter(sizes.values()))

    def _divisors(self, batches: list[tuple[Inputs, Tensor | None]], loss_fn: LossFunction | None) -> list[float]:
        """What each micro-batch's mean loss is divided by, so that the data ranks' mean of their sum is the mean loss."""
        counts = [batch["num_targets"].sum() for batch, _ in batches if isinstance(batch, Mapping) and "num_targets" in batch]
        if loss_fn is not None or not counts:
            return [float(len(batches))] * len(batches)
        numbers = torch.stack(counts).tolist()
        (total,) = self.data.sum(float(sum(numbers)))
        return [total / (number * self.data.size) if number else math.inf for number in numbers]

    def _loss(self, inputs: Inputs, targets: Tensor | None, loss_fn: LossFunction | None) -> Tensor:
        if loss_fn is None or targets is None:
            model: Any = self.model
            loss: Tensor = model.loss(inputs).loss
            return loss
        if isinstance(inputs, Tensor):
            return loss_fn(self.model(inputs), targets)
        return loss_fn(self.model(inputs["tokens"], inputs.get("documents")), targets)

    def _before_step(self, *_step: Any) -> None:
        self._finish()
        share_scaling(self.model, self.stage)

    def _after_step(self, *_step: Any) -> None:
        self.gradients.is_finished = False
        for parameter in self.model.parameters():
            if isinstance(parameter.grad, DividedGradient):
                parameter.grad = None
        self.publish()

    def _zero_grad(self, zero_grad: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Drop gradients, exchanged ones too: a rank that has none in the next step takes part in its exchange."""
        zero_grad(*args, **kwargs)
        self.gradients.is_finished = False

    def _mark_divided(self) -> None:
        """Give the parameters whose gradients are pieces a gradient that says so, where None would be taken for none."""
        for parameter in getattr(self.optimizer, "pieces", {}):
            parameter.grad = DividedGradient(parameter.shape, gradient_dtype(parameter), parameter.device)

    def _finish(self) -> None:
        """Take part in the exchange on a rank where no gradient has arrived since a step, or since gradients were dropped."""
        holds_means = any(parameter.grad is not None for parameter in self.model.parameters())
        if not (self.gradients.is_finished and holds_means):
            self.gradients.finish()


def start_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    axes: Axes,
    zero_stage: int,
    wide_dtype: torch.dtype,
    plan: Plan,
    degrees: Degrees,
) -> OwnLoop:
    """Make a model and its optimizer parallel over ranks that each compute all of its blocks."""
    broadcast_parameters(model, axes.stage)
    broadcast_masters(optimizer, axes)
    if axes.tensor.size > 1:  # `initialize` knows the world alone
        share_rounding(model, axes.replicas.rank, axes.replicas.size)
    shards = cut_model(model, optimizer, axes, plan, sequence=degrees["sequence"])
    loop = OwnLoop(model, optimizer, axes, zero_stage=zero_stage, wide_dtype=wide_dtype, shards=shards)
    if axes.replicas.size > 1:
        OwnDraws(axes.replicas).around(model)
    loop.hook(degrees["micro_batches"])
    return loop


def broadcast_masters(optimizer: torch.optim.Optimizer, axes: Axes) -> None:
    """Give every rank the first rank's master weights, of which its codes are the rounding."""
    for state in optimizer.state.values():
        for entries in state.get("master_weights", {}).values():
            axes.world.broadcast_(entries)

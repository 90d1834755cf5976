"""`ParallelLoop`: `Parallel` for loops of one's own. Hooks of the optimizer call it where the trainer of jobs does.

A loop calls `backward` itself, or gives whole batches to `step`, which divides them into micro-batches. Where ranks hold stages
of the model, `step` runs their passes (`pipeline/loop.py`).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from octet.worker.kernels.torch_private import disabled_torch_function, make_wrapper_subclass
from octet.worker.mesh import Axes
from octet.worker.parallel.batches import Inputs, LossFunction, MicroBatch, check_batch, loss_divisors, micro_batches_of
from octet.worker.parallel.buckets import gradient_dtype
from octet.worker.parallel.parallel import Parallel
from octet.worker.parallel.rank_random import RankRandom

if TYPE_CHECKING:
    from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

    from octet.worker.parallel.pipeline.loop import PipelinePasses


class ModelPasses:
    """The passes of a rank that computes the whole model. `PipelinePasses` are those of ranks that hold stages."""

    is_first_stage = True
    is_last_stage = True

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel

    def run(self, batches: list[MicroBatch], divisors: list[float], loss_fn: LossFunction | None) -> Tensor:
        """Run the passes of all micro-batches. Returns the sum of the divided losses, fp32 ()."""
        losses = []
        for index, batch in enumerate(batches):
            with self._parallel.no_sync(index < len(batches) - 1), torch.enable_grad():
                loss = self._loss(batch, loss_fn) / divisors[index]
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def evaluate(self, batch: MicroBatch, loss_fn: LossFunction | None) -> Tensor | None:
        """Return the mean loss of a batch, fp32 ()."""
        return self._loss(batch, loss_fn)

    def check(self, loss_fn: LossFunction | None) -> None:
        """Raise for a step that cannot be taken now; this one always can."""

    def needs_exchange(self) -> bool:
        """Return True if gradients are not means yet: on a rank without any since a step, or since they were dropped."""
        gradients = self._parallel.gradients
        return not (gradients.is_finished and any(parameter.grad is not None for parameter in gradients.model.parameters()))

    def note_exchange(self) -> None:
        """Take note that gradients are means now."""

    def forget(self, *, drops_gradients: bool) -> None:
        """Begin a new step. drops_gradients: it was not taken."""

    def _loss(self, batch: MicroBatch, loss_fn: LossFunction | None) -> Tensor:
        model: Any = self._parallel.model
        inputs, targets = batch
        if loss_fn is None or targets is None:
            loss: Tensor = model.loss(inputs).loss
            return loss
        if isinstance(inputs, Tensor):
            return loss_fn(model(inputs), targets)
        return loss_fn(model(inputs["tokens"], inputs.get("documents")), targets)


class ParallelLoop(Parallel):
    """`Parallel` for a loop that calls `backward` and `optimizer.step` alone: all else happens in hooks."""

    passes: "ModelPasses | PipelinePasses"

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, axes: Axes, *, num_micro_batches: int = 1, **options: Any
    ) -> None:
        """num_micro_batches: of each batch that `step` gets. options: of `Parallel`."""
        super().__init__(model, optimizer, axes, **options)
        self.num_micro_batches = num_micro_batches
        if self.pipeline is None:
            self.passes = ModelPasses(self)
        else:
            from octet.worker.parallel.pipeline.loop import PipelinePasses  # loads torch's pipelining

            self.passes = PipelinePasses(model, self.pipeline, self.no_sync, self.shards.has_sharded_logits)
        num_drawing = axes.pipeline.size * axes.replicas.size
        if num_drawing > 1:
            RankRandom(self.data.device, axes.pipeline.rank * axes.replicas.size + axes.replicas.rank).around(model)
        self.gradients.finishes_itself = True
        self.gradients.after_finish = self._mark_sharded
        optimizer.zero_grad = partial(self._zero_grad, optimizer.zero_grad)  # type: ignore[method-assign]  # it has no hooks
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @property
    def is_first_stage(self) -> bool:
        """True if this rank computes the model's first blocks."""
        return self.passes.is_first_stage

    @property
    def is_last_stage(self) -> bool:
        """True if this rank computes the model's output, and has the losses."""
        return self.passes.is_last_stage

    @property
    def schedule(self) -> "Schedule1F1B | ScheduleInterleaved1F1B | None":
        """torch's schedule of the newest step; None before the first one, and without a pipeline."""
        return None if self.pipeline is None else self.pipeline.schedule

    def step(self, inputs: Inputs, targets: Tensor | None = None, loss_fn: LossFunction | None = None) -> Tensor | None:
        """Run the forward and backward passes of a batch, in micro-batches. Returns its mean loss on the last stage, fp32 ().

        Clipping and the optimizer's step come after it; several calls before these accumulate. All ranks but those of the data
        axis give the same batch. inputs: samples along dimension 0, a multiple of micro_batches. loss_fn: of a micro-batch's
        output and targets, on the last stage. Without it a language model of ours computes its own loss: inputs is then a batch
        of tensors as its `loss` takes it, weighted by "num_targets" where it has any. Ranks without the last stage return None.
        Raises ValueError for a batch that does not divide, and for a loss function that is missing or cannot be used.
        """
        batches = micro_batches_of(inputs, targets, self._check(inputs, targets, loss_fn), self.num_micro_batches)
        loss = self.passes.run(batches, loss_divisors(batches, loss_fn, self.data), loss_fn)
        return loss if self.is_last_stage else None

    @torch.no_grad()
    def evaluate(self, inputs: Inputs, targets: Tensor | None = None, loss_fn: LossFunction | None = None) -> Tensor | None:
        """Return the mean loss of a batch of any number of samples, fp32 (), on the last stage. Arguments as for `step`.

        It does not change the model's mode: call `model.eval()` before.
        """
        self._check(inputs, targets, loss_fn)
        return self.passes.evaluate((inputs, targets), loss_fn)

    def finish_gradients(self) -> None:
        """Wait until gradients are means over the ranks, if they are not, also on a rank where none has arrived."""
        if self.passes.needs_exchange():
            super().finish_gradients()
            self.passes.note_exchange()

    def clip_grad_norm_(self, max_norm: float = math.inf) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most max_norm. Returns the norm before, fp32 ()."""
        self.finish_gradients()
        return super().clip_grad_norm_(max_norm)

    def _check(self, inputs: Inputs, targets: Tensor | None, loss_fn: LossFunction | None) -> int:
        self.passes.check(loss_fn)
        return check_batch(self.model, inputs, targets, loss_fn)

    def _before_step(self, *_step: Any) -> None:
        self.synchronize()

    def _after_step(self, *_step: Any) -> None:
        self.gradients.is_finished = False
        self.passes.forget(drops_gradients=False)
        for parameter in self.model.parameters():
            if isinstance(parameter.grad, ShardedGrad):
                parameter.grad = None
        self.publish()

    def _zero_grad(self, zero_grad: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Drop gradients, exchanged ones too: a rank that has none in the next step takes part in its exchange."""
        self.drop_interrupted_pass()
        zero_grad(*args, **kwargs)
        self.gradients.is_finished = False
        self.passes.forget(drops_gradients=True)

    def _mark_sharded(self) -> None:
        """Put a gradient that may not be read where None would stand for no gradient, since the ranks hold it in pieces."""
        for parameter in getattr(self.optimizer, "pieces", {}):
            parameter.grad = ShardedGrad(parameter.shape, gradient_dtype(parameter), parameter.device)


# A gradient without values, which a parameter holds while the ranks hold its mean in pieces (ZeRO).
#
# Without it the gradient would be None, and `torch.nn.utils.clip_grad_norm_(model.parameters(), …)` would clip nothing and
# return 0. Every op on it is refused with what to call instead.

_REFUSED = (
    "this gradient is divided over the ranks (ZeRO): no rank holds it. Allowed: Parallel.clip_grad_norm_(max_norm) in place of "
    "torch.nn.utils.clip_grad_norm_; optimizer.step() or optimizer.zero_grad() before another backward pass. Use no_sync for "
    "all micro-batches but the last."
)


class ShardedGrad(Tensor):
    """Presents as a gradient of a shape and holds no values. Every op raises ValueError."""

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> "ShardedGrad":
        made: ShardedGrad = make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGrad(shape={tuple(self.shape)}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return no tensors, so that it counts no bytes."""
        return [], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: None, size: torch.Size, stride: tuple[int, ...]) -> "ShardedGrad":
        raise ValueError(_REFUSED)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # by which torch hands a gradient on without reading it
            return args[0]
        raise ValueError(_REFUSED)

"""The blocks that a model repeats: each is compiled, and checkpointed, by itself.

Compiling a block takes seconds where a whole model takes minutes, and blocks of one class and shape share one graph.
Checkpointing keeps a block's input and computes the block again in the backward pass (Chen et al. 2016, arXiv 1604.06174);
selective checkpointing keeps the results of matrix products and attention too, and repeats what lies between them.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from api_schemas import EventReport, PhaseReport, ReportBody
from worker.fp8.linear import Float8Linear
from worker.fp8.norm_forward import NormForward

Checkpointing = Literal["none", "selective", "full"]
Compiling = Literal["auto", "on", "off"]

WARM_UP_STEPS = 3
"""By then the compiler has seen a step with statistics and one without; what it compiles later is a fault."""

MAX_REASON_LENGTH = 300

_KEPT_OPS = frozenset(
    {
        *("octet::matmul", "aten::_scaled_mm", "aten::mm", "aten::addmm", "aten::bmm", "aten::convolution"),
        *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention"),
        *("aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    }
)
"""What selective checkpointing does not compute again."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: the children of its outermost lists whose children are alike.

    A list of stages of different shapes, as Swin's, is searched for the lists inside.
    """
    return list(_blocks(model))


def prepare_blocks(
    model: nn.Module, checkpointing: Checkpointing, compiling: Compiling, device: torch.device
) -> "CompileWatch | None":
    """Checkpoint and compile a model's blocks as a job's options say. Returns None if nothing is compiled."""
    checkpoint_blocks(model, checkpointing)
    is_wanted = compiling == "on" or (compiling == "auto" and device.type == "cuda")
    return CompileWatch() if is_wanted and compile_blocks(model) else None


def compile_blocks(model: nn.Module, backend: str = "inductor") -> int:
    """Compile each repeated block, for static shapes. Returns their number. Nothing is compiled before a block is called.

    Call it after `initialize` and the functions that change blocks. backend: inductor, or aot_eager, whose graphs are run op by
    op; blocks that keep their activations in FP8 (`keep_activations_in_fp8`) do so in both.
    """
    blocks = repeated_blocks(model)
    for block in blocks:
        told = getattr(block.forward, "tell_compiler", None)  # of worker/saved_activations.py
        how = {"backend": backend} if told is None else told(backend)
        block.compile(dynamic=False, **how)
    return len(blocks)


def checkpoint_blocks(model: nn.Module, kind: Checkpointing) -> int:
    """Let each repeated block compute again in the backward pass what it does not keep. Returns their number."""
    blocks = repeated_blocks(model) if kind != "none" else []
    for block in blocks:
        block.forward = CheckpointedForward(block, is_selective=kind == "selective")
        if kind == "selective":
            for part in block.modules():
                forward = getattr(vars(part).get("forward"), "__self__", None)
                if isinstance(part, Float8Linear):
                    part.is_usual = False  # its one op would make codes and product, of which the product alone is to be kept
                elif isinstance(forward, NormForward):
                    forward.taker = None
    return len(blocks)


class CheckpointedForward:
    """Takes the place of a block's `forward`, and calls what was there."""

    def __init__(self, block: nn.Module, *, is_selective: bool) -> None:
        self.forward = block.forward
        self.options: dict[str, Any] = {"use_reentrant": False}
        if is_selective:
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, **self.options, **kwargs)


class CompileWatch:
    """Follows what torch compiles in the steps of a run: all of it should be done after the first three."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_graphs, self._began_s = _num_graphs(), _compile_time_s()
        self._breaks = _graph_breaks()

    def after_step(self) -> tuple[ReportBody, ...]:
        """Return what to report of a step: the end of the warm-up, a graph compiled after it, and graphs that were broken."""
        self._num_steps += 1
        return (*self._compiled(), *self._broken())

    def _compiled(self) -> tuple[ReportBody, ...]:
        num_new = _num_graphs() - self._num_graphs
        if self._num_steps == WARM_UP_STEPS:
            self._num_graphs += num_new
            seconds = round(_compile_time_s() - self._began_s, 3)
            message = f"compiled {num_new} graphs of the model's blocks in {seconds:.1f} s, in the first {WARM_UP_STEPS} steps"
            event = EventReport(type="training.compiled", message=message, data={"graphs": num_new, "seconds": seconds})
            return PhaseReport(phase="warmed_up"), event
        if self._num_steps > WARM_UP_STEPS and num_new:
            self._num_graphs += num_new
            message = (
                f"step {self._num_steps} of this attempt compiled {num_new} more graphs; expected: none after step "
                f"{WARM_UP_STEPS}. If it goes on, set training.compile to off."
            )
            return (EventReport(type="training.recompiled", message=message, data={"graphs": num_new}),)
        return ()

    def _broken(self) -> tuple[ReportBody, ...]:
        now = _graph_breaks()
        new, self._breaks = now - self._breaks, now
        if not new:
            return ()
        reason = " ".join(next(iter(new)).split())[:MAX_REASON_LENGTH]
        message = (
            f"step {self._num_steps} of this attempt left compiled code {new.total()} times within a block; expected: never. "
            f"It is slower than one graph. The first reason: {reason}"
        )
        return (EventReport(type="training.graph_broken", message=message, data={"graph_breaks": new.total()}),)


def is_compiling_fault(report: ReportBody) -> bool:
    """Whether a report tells of what the compiler should not have done. Each stage of a pipeline has graphs of its own."""
    return isinstance(report, EventReport) and report.type in ("training.recompiled", "training.graph_broken")


def eagerly() -> AbstractContextManager[Any]:
    """Inside, compiled blocks run as they are written, and nothing is compiled."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _num_graphs() -> int:
    from torch._dynamo.utils import counters  # takes a second to load; only a run that compiles needs it

    return int(counters["stats"]["unique_graphs"])


def _graph_breaks() -> Counter[str]:
    """How often the compiler has broken a graph, by reason."""
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"])


def _compile_time_s() -> float:
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent()["total_wall_time"])


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_kept = getattr(op, "overloadpacket", op)._qualified_op_name in _KEPT_OPS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and children and _are_alike(children):
        yield from children
        return
    for child in children:
        yield from _blocks(child)


def _are_alike(modules: list[nn.Module]) -> bool:
    """Whether they are of one class, hold modules with matrices, and have parameters of the same shapes."""
    kinds = {
        (type(module), tuple((name, parameter.shape) for name, parameter in module.named_parameters())) for module in modules
    }
    has_matrices = any(parameter.dim() > 1 for part in modules[0].children() for parameter in part.parameters())
    return len(kinds) == 1 and has_matrices

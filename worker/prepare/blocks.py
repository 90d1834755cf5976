"""The blocks that a model repeats: each is compiled, and checkpointed, by itself.

Compiling a block takes seconds where a whole model takes minutes, and blocks of one class and shape share one graph.
Checkpointing keeps a block's input and computes the block again in the backward pass (Chen et al. 2016, arXiv 1604.06174);
selective checkpointing keeps the results of matrix products and attention too, and repeats what lies between them.
"""

from collections import Counter
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from octet.api_schemas import EventReport, PhaseReport, ReportBody
from octet.worker.common.wrap import Nesting, Wrapper, wrap, wrapper_of
from octet.worker.fp8.experts import has_experts
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.norm_forward import NormForward
from octet.worker.kernels.library import call_directly_in_graphs
from octet.worker.kernels.torch_private import compile_time_s, compile_what_forward_passes_remember, compiler_counters
from octet.worker.models.blocks import repeated_blocks
from octet.worker.prepare.saved_activations import SavingForward

Checkpointing = Literal["none", "selective", "full"]
Compiling = Literal["auto", "on", "off"]

WARM_UP_STEPS = 3
"""By then the compiler has seen a step with statistics and one without; what it compiles later is a fault."""

MAX_REASON_LENGTH = 300

_KEPT_OPS = frozenset(
    {
        *("octet::linear_output", "aten::_scaled_mm", "aten::mm", "aten::addmm", "aten::bmm", "aten::convolution"),
        *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention"),
        *("octet::document_attention", "aten::_scaled_dot_product_cudnn_attention"),
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    }
)
"""The results that selective checkpointing keeps."""


def prepare_blocks(
    model: nn.Module, checkpointing: Checkpointing, compiling: Compiling, device: torch.device
) -> "CompileWatch | None":
    """Checkpoint and compile a model's blocks by a job's options. Returns None if nothing is compiled."""
    checkpoint_blocks(model, checkpointing)
    is_wanted = compiling == "on" or (compiling == "auto" and device.type == "cuda")
    return CompileWatch() if is_wanted and compile_blocks(model) else None


def compile_blocks(model: nn.Module, backend: str = "inductor") -> int:
    """Compile each repeated block, for static shapes. Returns their number. Nothing is compiled before a block is called.

    Blocks with experts are left out: in each pass the host reads how many tokens each expert has.
    Call it after `initialize` and the functions that change blocks. Graphs of inductor call our kernels without torch's
    dispatcher. Where blocks are checkpointed, what any compiled function of this process changes in Python is not done again
    backward. backend: inductor, or aot_eager, whose graphs are run op by op; blocks that keep their activations in FP8
    (`keep_activations_in_fp8`) do so in both.
    """
    blocks = [block for block in repeated_blocks(model) if not has_experts(block)]
    if backend == "inductor":
        call_directly_in_graphs()
    if any(wrapper_of(block, CheckpointedForward) for block in blocks):  # layers of tensor ranks remember an input they share
        compile_what_forward_passes_remember()
    for block in blocks:
        saving = wrapper_of(block, SavingForward)
        options = {"backend": backend} if saving is None else saving.leave_to_compiler(backend)
        block.compile(dynamic=False, **options)
    return len(blocks)


def checkpoint_blocks(model: nn.Module, kind: Checkpointing) -> int:
    """Let each repeated block compute again in the backward pass what it does not keep. Returns their number."""
    blocks = repeated_blocks(model) if kind != "none" else []
    for block in blocks:
        wrap(block, CheckpointedForward(is_selective=kind == "selective"))
        if kind == "selective":
            for part in block.modules():
                if isinstance(part, Float8Linear):
                    part.keeps_products = True
                elif (norm := wrapper_of(part, NormForward)) is not None:
                    norm.next_consumer = None
    return len(blocks)


class CheckpointedForward(Wrapper):
    """Computes one block, and computes it again in the backward pass."""

    nesting = Nesting.CHECKPOINT

    def __init__(self, *, is_selective: bool) -> None:
        self.options: dict[str, Any] = {"use_reentrant": False}
        if is_selective:
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        return checkpoint(self.run, *args, **self.options, **kwargs)


class CompileWatch:
    """Follows what torch compiles in the steps of a run: all of it should be done after the first three."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_graphs, self._began_s = _num_graphs(), compile_time_s()
        self._breaks = _graph_breaks()

    def after_step(self) -> tuple[ReportBody, ...]:
        """Return what to report of a step: the end of the warm-up, a graph compiled after it, and graphs that were broken."""
        self._num_steps += 1
        return (*self._compiled(), *self._broken())

    def _compiled(self) -> tuple[ReportBody, ...]:
        num_new = _num_graphs() - self._num_graphs
        if self._num_steps == WARM_UP_STEPS:
            self._num_graphs += num_new
            seconds = round(compile_time_s() - self._began_s, 3)
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
    """Return whether a report is of a fault of the compiler. Each stage of a pipeline has graphs of its own."""
    return isinstance(report, EventReport) and report.type in ("training.recompiled", "training.graph_broken")


def eagerly() -> AbstractContextManager[Any]:
    """Inside, compiled blocks run as they are written, and nothing is compiled."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _num_graphs() -> int:
    return int(compiler_counters()["stats"]["unique_graphs"])


def _graph_breaks() -> Counter[str]:
    """Count how often the compiler has broken a graph, by reason."""
    return Counter(compiler_counters()["graph_break"])


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_kept = getattr(op, "overloadpacket", op)._qualified_op_name in _KEPT_OPS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

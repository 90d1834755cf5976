"""A CUDA graph on a CPU: the ops of a step, recorded with the numbers that the host gave, and run again with the same ones.

A replay reads and writes the tensors of the recording, as a graph reads and writes addresses. It runs no Python of ours: ops
that a subclass of tensors makes are recorded one by one; the optimizer's kernels get the arguments of the recording.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from octet.worker.kernels.cuda import optimizer_tables as tables
from octet.worker.optim import LowBitOptimizer
from octet.worker.optim import fused as fused_step

WAITING_OPS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "allclose", "_unique2"}
"""Ops for which a host waits."""

_launch = fused_step.kernel.launch


class Tape(TorchDispatchMode):
    """Records the ops that run inside, and the launches of the optimizer's kernels."""

    present: "Tape | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        subclasses = [type(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for subclass in subclasses:
            if subclass.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
                with self:
                    return subclass.__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if name in WAITING_OPS:
            raise AssertionError(f"a recorded step waits for the device: {name}")
        result = func(*args, **kwargs)
        self.entries.append((name, func, args, kwargs, result))
        return result

    def note_launch(self, arguments: tuple[Any, ...]) -> None:
        self.entries.append(("launch", launch_unseen, arguments, {}, None))

    def host_values(self) -> list[tuple[str, list[str]]]:
        """Return each entry's name with what the host gave: its arguments but for tensors, and tensors that the host made.

        Of a table of addresses, which differ from one recording to the next, only the numbers.
        """
        return [
            (
                name,
                [
                    str(_without_addresses(leaf) if isinstance(leaf, Tensor) else leaf)
                    for leaf in tree_leaves((args, kwargs))
                    if not isinstance(leaf, Tensor) or name == "lift_fresh"
                ],
            )
            for name, _, args, kwargs, _ in self.entries
        ]

    def made_on_the_host(self) -> list[str]:
        """Return the tensors made of several Python numbers: CUDA refuses to capture their copy to the device."""
        return [str(made.tolist()) for name, *_, made in self.entries if name == "lift_fresh" and made.dim()]

    def replay(self) -> None:
        """Run all entries again. What was a new tensor in the recording is overwritten."""
        with torch.no_grad():
            for name, run, args, kwargs, recorded in self.entries:
                if name == "resize_":  # changes a shape alone, which lasts
                    continue
                given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
                found = run(*args, **kwargs)
                for was, now in zip(tree_leaves(recorded), tree_leaves(found), strict=True):
                    if isinstance(was, Tensor) and was.untyped_storage()._cdata not in given:
                        was.untyped_storage().copy_(now.untyped_storage())


def _without_addresses(table: Tensor) -> Tensor:
    """The columns of the optimizer's table of parameters that are numbers, and any other tensor as it is."""
    if table.dtype != torch.int64 or table.ndim != 2 or table.shape[1] != tables.NUM_PARAMETER_COLUMNS.value:
        return table
    numbers = (tables.NUM_ELEMENTS, tables.FIRST_ELEMENT, tables.STREAM, tables.GROUP)
    with _disable_current_modes():
        return table[:, [column.value for column in numbers]]


class TapeRecorder:
    """Takes the place of `CudaRecorder`."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.num_replays = self.num_forgotten = 0

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def forget(self) -> None:
        self.num_forgotten += 1

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        tape = Tape()
        self.tapes.append(tape)
        with tape, mock.patch.object(Tape, "present", tape):
            result = work()

        def replay() -> None:
            self.num_replays += 1
            tape.replay()

        return result, replay


def launch_unseen(*arguments: Any) -> None:
    """Launch the optimizer's kernels. Triton's interpreter reads the tensors that a GPU would read."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        _launch(*arguments)


def _launch_on_tape(*arguments: Any) -> None:
    if Tape.present is not None:
        Tape.present.note_launch(arguments)
    launch_unseen(*arguments)


@contextmanager
def optimizer_by_kernels() -> Iterator[None]:
    """Inside, optimizers step by their kernels, as on CUDA, and a tape records the launches."""
    with (
        mock.patch.object(LowBitOptimizer, "is_fused", lambda _optimizer, parameter: parameter.is_contiguous()),
        mock.patch.object(fused_step.kernel, "launch", _launch_on_tape),
    ):
        yield

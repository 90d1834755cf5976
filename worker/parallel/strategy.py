"""The form of a parallel strategy: one module that names its axis, checks a model for it, and divides the model.

`strategies.py` lists them. A strategy leaves a `DividedModel` behind, which does the strategy's share of each step; where the
job's rules cannot see a conflict before a rank has the model, `check` raises it before anything is changed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octet.api_schemas import AxisName
from octet.api_schemas.rules.parallelism import DEGREES
from octet.api_schemas.rules.rule import Facts
from octet.worker.fp8.loss_scaling import STATE_BUFFER
from octet.worker.fp8.weight import tensors_in_memory
from octet.worker.mesh import Axes, Axis
from octet.worker.models.blocks import repeated_blocks
from octet.worker.models.model import Part


@dataclass(eq=False)
class Division:
    """A converted model and its optimizer, while strategies divide them over the axes of a mesh, one after the other.

    plan: roles of layers by globs of their names, in place of the model's own plan. sequence: tensor ranks also divide tokens.
    blocks: the name of the list of blocks of a model that is not ours. runs: the runs of blocks that this rank computes in one
    go; empty where it computes the whole model. parts: what strategies have left, in the order in which they divide.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    axes: Axes
    plan: Mapping[str, str] | None = None
    sequence: bool = False
    blocks: str | None = None
    runs: Sequence[Part] = ()
    parts: "list[DividedModel]" = field(default_factory=list)


class Strategy(ABC):
    """One way in which ranks share the training of a model."""

    axis: ClassVar[AxisName]
    """The axis of the ranks that share it. The strategy is used where this axis has several ranks."""

    @abstractmethod
    def check(self, division: Division) -> None:
        """Raise ValueError for a model or an optimizer that the ranks cannot share. Neither is changed."""

    @abstractmethod
    def apply(self, division: Division) -> None:
        """Let this rank keep its share of the model. All ranks hold the same model before, and call it together."""


class DividedModel:
    """The part that one strategy takes in the steps of a model that it has divided. By default it does nothing."""

    axis_name: ClassVar[AxisName]
    """The axis over which parameters are divided."""
    lies_in_replicas: ClassVar[bool] = False
    """True if its axis is a part of the replicas: ZeRO divides over them what the ranks of the axis hold alike."""
    clip_alone: Callable[[float], Tensor] | None = None
    """Clips gradients with the bits of one process, where no other strategy divides the model."""

    def follow(self, replaced: Mapping[Tensor, nn.Parameter]) -> None:
        """Take the parameters that a later strategy has put in the place of this rank's."""

    def counts(self, parameter: Tensor) -> bool:
        """Return True if this rank's copy counts where ranks add up what they hold; one copy of each parameter does."""
        return True

    def held_apart(self) -> Mapping[nn.Module, Axis]:
        """Return the modules that not all replicas hold alike, with the ranks that do."""
        return {}

    def own_values(self, parameter: Tensor, values: Tensor) -> Tensor:
        """Return what this rank holds of the values of a parameter that an earlier strategy has left it."""
        return values

    def before_exchange(self) -> None:
        """Complete this rank's gradients, before they are exchanged with its replicas."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Agree on what the optimizer's step has written, where ZeRO does not."""

    def mark(
        self, model: dict[str, Any], optimizer_state: dict[str, Any], optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return state dicts for a checkpoint, with the place of each tensor in the model before this strategy."""
        return model, optimizer_state

    def own_part(
        self, model: dict[str, Any], optimizer_state: dict[str, Any], optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what this rank loads of state dicts that hold all that this strategy divides."""
        return model, optimizer_state


def replicas_by_tensor(parts: Iterable[DividedModel]) -> dict[Tensor, Axis]:
    """Return the parameters and tensors in memory that not all replicas hold alike, with the ranks that do."""
    return {
        tensor: axis
        for part in parts
        for module, axis in part.held_apart().items()
        for tensor in (*module.parameters(), *tensors_in_memory(module))
    }


def check_loss_scaling(model: nn.Module, degree: str) -> None:
    """Raise ValueError for a model that scales its losses. degree: the one that divides its activations."""
    if any(name.rpartition(".")[2] == STATE_BUFFER for name, _ in model.named_buffers()):
        raise ValueError(
            f"the model scales its losses (fp16-amp); allowed with {degree}: levels without loss scaling. Use bf16-amp."
        )


def check_compiled(model: nn.Module, degree: str, *, allows_blocks: bool = False) -> None:
    """Raise ValueError for a compiled model, or for more compiled parts than its repeated blocks, where these may be.

    degree: the one that divides its activations.
    """
    allowed = set(repeated_blocks(model)) if allows_blocks else set[nn.Module]()
    if any(module._compiled_call_impl is not None for module in model.modules() if module not in allowed):
        what = "compiled blocks, from compile_blocks" if allows_blocks else "models that are not"
        raise ValueError(
            f"the model, or a part of it, is compiled; allowed with {degree}: {what}, since no graph of torch can follow what "
            "ranks exchange elsewhere. Leave compile out."
        )


def check_rules(fields: Mapping[str, object], level: str | None = None) -> None:
    """Raise ValueError for degrees, or a level with a pipeline, that the table of rules does not combine."""
    degrees: dict[str, object] = dict.fromkeys(("tensor", "context", "pipeline", "expert"), 1)
    fields = {**degrees, "sequence": False, "schedule": "1f1b", "zero_stage": 0, **fields}
    known = {f"parallelism.{name}": value for name, value in fields.items()}
    if conflict := DEGREES.first_conflict(Facts(known={**known, "precision.level": level})):
        raise ValueError(str(conflict).replace("parallelism.", ""))

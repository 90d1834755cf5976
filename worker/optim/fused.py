"""An optimizer step as two kernel launches for each combination of formats, on CUDA: `worker/kernels/cuda/optimizer.py`.

This side builds the tables of addresses. They are sent to the device only when an address or a hyperparameter has changed,
from pinned memory and without waiting.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.weight import stored
from octet.worker.kernels.cuda import optimizer as kernel
from octet.worker.kernels.cuda import optimizer_tables as tables
from octet.worker.kernels.cuda.tables import chunk_rows
from octet.worker.kernels.held import hold
from octet.worker.optim.gradients import gradient_of
from octet.worker.optim.origin import is_small
from octet.worker.optim.rules.rule import Group, Rule
from octet.worker.optim.states import OptimizerStates
from octet.worker.optim.weights import QuantizedWeight

_PLAIN = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_PARTS = ("codes", "dequant_scale", "steps")
# Columns of a parameter's row as plain integers: each step reads them for each parameter.
_WEIGHT, _WEIGHT_SCALE, _AMAX = tables.WEIGHT.value, tables.WEIGHT_SCALE.value, tables.AMAX.value
_REFINEMENT, _MASTER_SCALE = tables.REFINEMENT.value, tables.MASTER_SCALE.value
_GRADIENT, _GRADIENT_SCALE, _STEP = tables.GRADIENT.value, tables.GRADIENT_SCALE.value, tables.STEP.value
_NUM_ELEMENTS, _FIRST_ELEMENT, _STREAM = tables.NUM_ELEMENTS.value, tables.FIRST_ELEMENT.value, tables.STREAM.value
_GROUP, _STATES, _NUM_STATE_COLUMNS = tables.GROUP.value, tables.STATES.value, tables.NUM_STATE_COLUMNS.value


class Update(NamedTuple):
    """One parameter that a step changes.

    codecs: the name of each state's codec, in the rule's order. stream: the weight's random stream.
    state: its `step` is an int64 () on the parameter's device.
    """

    parameter: Tensor
    state: dict[str, Any]
    weight: QuantizedWeight | None
    codecs: tuple[str, ...]
    group_index: int
    stream: int
    first_element: int


def describe(optimizer: OptimizerStates, updates: Iterable[tuple[Tensor, Group]]) -> Iterator[Update]:
    """Yield the update of each parameter, given with its group. States that are missing are allocated."""
    num_states = len(optimizer.rule.state_codecs)
    groups = {id(group): (index, optimizer.codec_names(group)) for index, group in enumerate(optimizer.param_groups)}
    for parameter, group in updates:
        origin, (index, codecs) = optimizer.origins[parameter], groups[id(group)]
        yield Update(
            parameter,
            optimizer.state[parameter] or optimizer.allocate(parameter, group),
            optimizer.quantized.get(parameter),
            ("fp32",) * num_states if is_small(origin) else codecs,
            index,
            origin.parameter_index * (1 + num_states),
            origin.first_draw,
        )


class Row:
    """One parameter's row of a table, without the columns of its gradient. It holds while all but the gradient stays."""

    __slots__ = ("_columns", "_held", "_wide", "update")

    def __init__(self, update: Update, rule: Rule) -> None:
        self.update = update
        self._columns = _addresses(update, rule)
        self._held, self._wide = _held(update, self._columns), _wide(self._columns)

    def with_gradient(self, gradient: Tensor, rule: str, *, has_decay: bool) -> tuple[kernel.Formats, tuple[int, ...]]:
        """Return what the kernels are compiled for, and the columns. has_decay: weight decay is part of the gradient."""
        if type(gradient) is Float8Gradient:
            arriving, address, scale = "fp8", gradient.codes.data_ptr(), gradient.dequant_scale.data_ptr()
        else:
            arriving, address, scale = _PLAIN[gradient.dtype], gradient.data_ptr(), 0
        columns = self._columns.copy()
        columns[_GRADIENT], columns[_GRADIENT_SCALE] = address, scale
        is_aligned = not (self._wide | address) % kernel.ALIGNMENT
        return _formats(rule, self._held, arriving, self.update.codecs, has_decay, is_aligned), tuple(columns)


class Rows:
    """The rows of a step's parameters. They may be used again as long as all but the gradients is where it was."""

    def __init__(self, updates: Iterable[Update], rule: Rule) -> None:
        self.rule, self.rows = rule, [Row(update, rule) for update in updates]

    def with_gradients(
        self, gradients: Sequence[Tensor], decays: Sequence[bool]
    ) -> dict[tuple[kernel.Formats, torch.device], list[tuple[int, ...]]]:
        """Return the tables by what the kernels are compiled for, and where they run.

        gradients: contiguous; they have to outlive the launch. decays: of each group, whether weight decay is part of them.
        """
        launches: dict[tuple[kernel.Formats, torch.device], list[tuple[int, ...]]] = {}
        for row, gradient in zip(self.rows, gradients, strict=True):
            has_decay = decays[row.update.group_index]
            formats, columns = row.with_gradient(gradient, self.rule.name, has_decay=has_decay)
            launches.setdefault((formats, row.update.parameter.device), []).append(columns)
        return launches


@dataclass
class FusedStep:
    """Steps parameters by a rule. Keeps the tables last sent to the device."""

    rule: Rule
    sent: dict[Any, tuple[Any, Tensor]] = field(default_factory=dict)

    def run(self, rows: Rows, groups: list[Group], finite: Tensor, seed: int) -> None:
        """One step, unless `finite`, bool () on the parameters' device, is false there. The host does not wait."""
        gradients = [gradient_of(row.update.parameter) for row in rows.rows]
        gradients = [each if type(each) is Float8Gradient else each.contiguous() for each in gradients]
        decays = [bool(self.rule.decays(group)[1]) for group in groups]
        for (formats, device), columns in rows.with_gradients(gradients, decays).items():
            num_chunks = [-(-row[_NUM_ELEMENTS] // kernel.CHUNK) for row in columns]
            on_device = kernel.Tables(
                self._send((formats, "parameters"), columns, device, lambda rows: rows, torch.int64),
                self._send_groups(groups, device),
                self._send((formats, "chunks"), num_chunks, device, chunk_rows, torch.int32),
            )
            kernel.launch(formats, on_device, finite.to(device), seed)

    def send_groups_again(self, groups: list[Group]) -> None:
        """Bring the hyperparameters on the devices up to date, where they lie: a recorded step reads them there."""
        for name, device in list(self.sent):
            if name == "groups":
                self._send_groups(groups, device)

    def _send_groups(self, groups: list[Group], device: torch.device) -> Tensor:
        sent = self._send(
            "groups", [self._hyperparameters(group) for group in groups], device, lambda rows: rows, torch.float64
        )
        for row, group in zip(sent, groups, strict=True):
            if isinstance(group["lr"], Tensor):  # copied on the device: the replay of a CUDA graph sees its new value
                row[tables.LR.value].copy_(group["lr"])
        return sent

    def _hyperparameters(self, group: Group) -> tuple[float, ...]:
        """The group's row."""
        lr = 0.0 if isinstance(group["lr"], Tensor) else group["lr"]
        own = self.rule.kernel_hyperparameters(group)
        unused = (0.0,) * (tables.MAX_RULE_HYPERPARAMETERS - len(own))
        return (lr, *self.rule.decays(group), -1.0 if group["maximize"] else 1.0, *own, *unused)

    def _send(
        self, name: Any, content: Any, device: torch.device, rows: Callable[[Any], list[Any]], dtype: torch.dtype
    ) -> Tensor:
        known = self.sent.get((name, device))
        if known is None or known[0] != content:
            host = torch.tensor(rows(content), dtype=dtype, pin_memory=device.type == "cuda")
            if known is not None and name == "groups" and known[1].shape == host.shape:
                known = (content, known[1].copy_(host, non_blocking=True))
            else:
                known = (content, host.to(device, non_blocking=True))
            self.sent[name, device] = known
            hold(known[1], host)
        hold(known[1])
        return known[1]


def _addresses(update: Update, rule: Rule) -> list[int]:
    """The parameter's row, without its gradient. `AddressCache` compares everything that is read here."""
    parameter, state, weight = update.parameter, update.state, update.weight
    row = [0] * tables.NUM_PARAMETER_COLUMNS.value
    row[_WEIGHT] = stored(parameter).data_ptr()
    if weight is not None:
        row[_WEIGHT_SCALE], row[_AMAX] = weight.dequant_scale.data_ptr(), weight.amax.data_ptr()
        residual = weight.residual
        if residual is not None:
            row[_REFINEMENT] = residual.data_ptr()
        elif weight.needs_master:
            master = state["master_weights"]
            row[_REFINEMENT], row[_MASTER_SCALE] = master["codes"].data_ptr(), master["dequant_scale"].data_ptr()
    column = _STATES
    for name in rule.state_codecs:
        parts = state[name]
        for number, part in enumerate(_PARTS):
            if part in parts:
                row[column + number] = parts[part].data_ptr()
        column += _NUM_STATE_COLUMNS
    row[_STEP], row[_NUM_ELEMENTS] = state["step"].data_ptr(), stored(parameter).numel()
    row[_FIRST_ELEMENT], row[_STREAM], row[_GROUP] = update.first_element, update.stream, update.group_index
    return row


@cache
def _formats(rule: str, held: str, arriving: str, codecs: tuple[str, ...], adds_decay: bool, aligned: bool) -> kernel.Formats:
    """One object for parameters of the same formats."""
    return kernel.Formats(rule, held, arriving, " ".join(codecs), adds_decay, aligned)


def _held(update: Update, row: list[int]) -> str:
    """Return the name of the format in which the weight is held."""
    if update.weight is None:
        return _PLAIN[update.parameter.dtype]
    return "master" if row[_MASTER_SCALE] else "split" if row[_REFINEMENT] else "fp16-scaled"


def _wide(row: list[int]) -> int:
    """All bits of what kernels read in wide accesses, apart from the gradient."""
    wide = row[_WEIGHT] | row[_REFINEMENT] | row[_NUM_ELEMENTS]
    for column in range(_STATES, len(row), _NUM_STATE_COLUMNS):
        wide |= row[column]
    return wide

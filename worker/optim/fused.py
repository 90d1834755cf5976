"""An optimizer step as two kernel launches for each combination of formats, on CUDA: `worker/kernels/cuda/optimizer.py`.

This side builds the tables of addresses. They are sent to the device only when an address or a hyperparameter has changed,
from pinned memory and without waiting.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from worker.fp8.clipping import codes_of, scales_of
from worker.fp8.gradient import Float8Gradient
from worker.kernels.cuda import optimizer as kernel
from worker.kernels.cuda import optimizer_tables as tables
from worker.kernels.held import hold
from worker.optim.origin import is_small
from worker.optim.rule import Group, Rule
from worker.optim.weights import QuantizedWeight

if TYPE_CHECKING:
    from worker.optim.optimizer import LowBitOptimizer

_PLAIN = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_Rows = Sequence[Sequence[float]]
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


def describe(optimizer: "LowBitOptimizer", updates: Iterable[tuple[Tensor, Group]]) -> Iterator[Update]:
    """Yield the update of each parameter, given with its group. States that are missing are allocated."""
    num_states = len(optimizer.rule.state_codecs)
    groups = {id(group): (index, optimizer._codec_names(group)) for index, group in enumerate(optimizer.param_groups)}
    for parameter, group in updates:
        origin, (index, codecs) = optimizer._origins[parameter], groups[id(group)]
        yield Update(
            parameter,
            optimizer.state[parameter] or optimizer._allocate(parameter, group),
            optimizer._quantized.get(parameter),
            ("fp32",) * num_states if is_small(origin) else codecs,
            index,
            origin.parameter_index * (1 + num_states),
            origin.first_draw,
        )


class Row:
    """One parameter's row of a table. While the update stays the same, only the gradient's columns change."""

    __slots__ = ("_arriving", "_gradient", "_held", "_wide", "columns", "formats", "has_decay", "update")

    def __init__(self, update: Update, rule: Rule) -> None:
        self.update = update
        fixed = _addresses(update, rule)
        self.columns, self._held, self._wide = tuple(fixed), _held(update, fixed), _wide(fixed)
        self._gradient, self._arriving = (0, 0), ""
        self.formats: kernel.Formats | None = None
        self.has_decay = False

    def take(self, gradient: Tensor, rule: str, *, has_decay: bool) -> bool:
        """Write down where the gradient is. Returns whether the kernels' formats have changed."""
        if type(gradient) is Float8Gradient:
            arriving, found = "fp8", (gradient.codes.data_ptr(), gradient.dequant_scale.data_ptr())
        else:
            arriving, found = _PLAIN[gradient.dtype], (gradient.data_ptr(), 0)
        if found == self._gradient and arriving == self._arriving and has_decay == self.has_decay:
            return False
        self._gradient, self._arriving, self.has_decay = found, arriving, has_decay
        columns = list(self.columns)
        columns[_GRADIENT], columns[_GRADIENT_SCALE] = found
        self.columns, before = tuple(columns), self.formats
        is_aligned = not (self._wide | found[0]) % kernel.ALIGNMENT
        self.formats = _formats(rule, self._held, arriving, self.update.codecs, has_decay, is_aligned)
        return self.formats is not before


class Rows:
    """The rows of a step's parameters. They may be used again as long as all but the gradients is where it was."""

    def __init__(self, updates: Iterable[Update], rule: Rule) -> None:
        self.rule, self.rows = rule, [Row(update, rule) for update in updates]
        self.launches: dict[tuple[kernel.Formats, torch.device], list[Row]] = {}
        """By what the kernels are compiled for, and where they run."""
        self._taken: list[Any] = []
        """What the rows say of gradients, and of the groups' decays."""

    def take_gradients(self, decays: Sequence[bool]) -> list[Tensor]:
        """Write down where the gradients are. Returns them, of which copies have to outlive the launch.

        decays: of each group, whether weight decay is part of the gradient.
        """
        gradients, is_changed, name = [_contiguous(row.update.parameter) for row in self.rows], False, self.rule.name
        held = [codes_of(gradients), scales_of(gradients)]
        addresses = [[*map(Tensor.data_ptr, tensors)] for tensors in held]
        taken = [*addresses, [*map(type, gradients)], [gradient.dtype for gradient in gradients], list(decays)]
        if taken == self._taken:
            return gradients
        self._taken = taken
        for row, gradient in zip(self.rows, gradients, strict=True):
            if row.take(gradient, name, has_decay=decays[row.update.group_index]):
                is_changed = True
        if is_changed:
            self.launches = {}
            for row in self.rows:
                assert row.formats is not None
                self.launches.setdefault((row.formats, row.update.parameter.device), []).append(row)
        return gradients


@dataclass
class FusedStep:
    """Steps parameters by a rule. Keeps the tables last sent to the device."""

    rule: Rule
    sent: dict[Any, tuple[Any, Tensor]] = field(default_factory=dict)

    def run(self, rows: Rows, groups: list[Group], finite: Tensor, seed: int) -> None:
        """One step, unless `finite`, bool () on the parameters' device, is false there. The host does not wait."""
        _gradients = rows.take_gradients([bool(self.rule.decays(group)[1]) for group in groups])
        for (formats, device), alike in rows.launches.items():
            columns = [row.columns for row in alike]
            sizes = [row[_NUM_ELEMENTS] for row in columns]
            on_device = kernel.Tables(
                self._send((formats, "parameters"), columns, device, lambda rows: rows, torch.int64),
                self._send_groups(groups, device),
                self._send((formats, "chunks"), sizes, device, _chunks, torch.int32),
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

    def _send(self, name: Any, content: Any, device: torch.device, rows: Callable[[Any], _Rows], dtype: torch.dtype) -> Tensor:
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


def _contiguous(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient if type(gradient) is Float8Gradient else gradient.contiguous()


def _addresses(update: Update, rule: Rule) -> list[int]:
    """The parameter's row, without its gradient. `Watch` has to know of everything that is read here."""
    parameter, state, weight = update.parameter, update.state, update.weight
    row = [0] * tables.NUM_PARAMETER_COLUMNS.value
    row[_WEIGHT] = parameter.data_ptr()
    if weight is not None:
        row[_WEIGHT_SCALE], row[_AMAX] = weight.dequant_scale.data_ptr(), weight.amax.data_ptr()
        residual = None if parameter.dtype == torch.float16 else weight.residual
        if residual is not None:
            row[_REFINEMENT] = residual.data_ptr()
        elif parameter.dtype != torch.float16:  # the codes alone are too coarse
            master = state["master_weights"]
            row[_REFINEMENT], row[_MASTER_SCALE] = master["codes"].data_ptr(), master["dequant_scale"].data_ptr()
    column = _STATES
    for name in rule.state_codecs:
        parts = state[name]
        for number, part in enumerate(_PARTS):
            if part in parts:
                row[column + number] = parts[part].data_ptr()
        column += _NUM_STATE_COLUMNS
    row[_STEP], row[_NUM_ELEMENTS] = state["step"].data_ptr(), parameter.numel()
    row[_FIRST_ELEMENT], row[_STREAM], row[_GROUP] = update.first_element, update.stream, update.group_index
    return row


@cache
def _formats(rule: str, held: str, arriving: str, codecs: tuple[str, ...], adds_decay: bool, aligned: bool) -> kernel.Formats:
    """One object for parameters of the same formats."""
    return kernel.Formats(rule, held, arriving, " ".join(codecs), adds_decay, aligned)


def _held(update: Update, row: list[int]) -> str:
    """How the weight is held."""
    if update.weight is None:
        return _PLAIN[update.parameter.dtype]
    return "master" if row[_MASTER_SCALE] else "split" if row[_REFINEMENT] else "fp16-scaled"


def _wide(row: list[int]) -> int:
    """All bits of what kernels read in wide accesses, apart from the gradient."""
    wide = row[_WEIGHT] | row[_REFINEMENT] | row[_NUM_ELEMENTS]
    for column in range(_STATES, len(row), _NUM_STATE_COLUMNS):
        wide |= row[column]
    return wide


def _chunks(sizes: list[int]) -> list[tuple[int, int]]:
    return [(row, chunk) for row, size in enumerate(sizes) for chunk in range(-(-size // kernel.CHUNK))]

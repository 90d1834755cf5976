"""Expert parallelism: each rank of the expert axis holds some experts of every mixture, and gets the tokens of these from all.

The ranks are data parallel ranks: they read different samples, and all else is whole on each of them. Tokens are sorted by
expert, go to the ranks of their experts in one exchange, and the outputs return in another; gradients do the same in the
backward pass. An expert sees its tokens in the order of the ranks, as one process would that reads their samples one after the
other, so it has the bits of that process. Its gradient is the sum over the ranks, which divide the gradients of outputs by
their number; replicas of the expert average it.

Inputs, and gradients of outputs, travel in codes where the experts take these with one scale of the present tensor: the ranks
agree on each expert's amax first, and so hold the codes that one process would make. They travel as values with windows of
past steps, where experts are multiplied one by one (`fp8/grouped.py`), and as gradients of experts with a bias. Outputs and
gradients of inputs are values.

Shape suffixes: S this rank's pairs of a token and an expert, X those of all ranks for the experts here, K features, E experts
of the mixture, R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker import kernels
from octet.worker.common.wrap import wrap
from octet.worker.fp8.experts import ExpertLinears, ExpertsForward, mixtures_of
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.operand import OperandScaling
from octet.worker.kernels import Operand
from octet.worker.mesh import Axes, Axis
from octet.worker.optim.sharding import check_unused
from octet.worker.parallel.held_part import HeldPart, in_pieces, joined_over, keep_part
from octet.worker.parallel.strategy import DividedModel, Division, Strategy, check_compiled


class ExpertParallel(Strategy):
    """Ranks hold different experts of every mixture, and read different samples."""

    axis = "expert"

    def check(self, division: Division) -> None:
        """Refuse models without mixtures that are held expert by expert, and numbers of experts that do not divide."""
        size, mixtures = division.axes.expert.size, mixtures_of(division.model)
        if not mixtures:
            raise ValueError(
                f"{type(division.model).__name__} has no experts that are layers of their own; allowed with an expert degree: "
                "mixtures of transformers, at a level that multiplies in FP8. Change the model or the level, or set the expert "
                "degree to 1."
            )
        for name, forward in mixtures.items():
            if len(forward.up) % size:
                raise ValueError(
                    f"{name} has {len(forward.up)} experts; allowed with an expert degree of {size}: multiples of {size}. "
                    "Change the model or the expert degree."
                )
        check_unused(division.optimizer)
        check_compiled(division.model, "an expert degree", allows_blocks=True)

    def apply(self, division: Division) -> None:
        """Keep this rank's experts of each mixture."""
        model, axis, replicas = division.model, division.axes.expert, division.axes.expert_replicas
        mixtures, absent = mixtures_of(model), []
        stacks = {name: linears for name, linears in model.named_modules() if isinstance(linears, ExpertLinears)}
        for name, linears in stacks.items():
            own = _share(axis, len(linears))
            absent += [f"{name}.{expert}" for expert in range(len(linears)) if expert not in own]
        held = keep_part(model, division.optimizer, absent)
        for layer in chain.from_iterable(linears.held.values() for linears in stacks.values()):
            if isinstance(layer, Float8Linear) and layer.gradient_position is not None:
                layer.gradient_position.share, layer.gradient_position.num_shares = replicas.rank, replicas.size
        on_ranks = [ExpertsOnRanks(axis) for _ in mixtures]
        for forward, wrapper in zip(mixtures.values(), on_ranks, strict=True):
            wrap(forward.module, wrapper)
        division.parts.append(DividedExperts(division.axes, held, stacks, on_ranks))


class DividedExperts(DividedModel):
    """One rank's experts of a model's mixtures."""

    axis_name = "expert"
    lies_in_replicas = True

    def __init__(
        self, axes: Axes, held: HeldPart, stacks: dict[str, ExpertLinears], mixtures: "Sequence[ExpertsOnRanks]"
    ) -> None:
        """stacks: of the model, by name."""
        self.axes, self.held, self.mixtures = axes, held, mixtures
        self.axis, self.replicas = axes.expert, axes.expert_replicas
        self._stacks = stacks
        self._first_rank = axes.layout.group("expert_replicas", axes.world.rank)[0]
        self._parameters = {parameter for linears in stacks.values() for parameter in linears.parameters()}

    def counts(self, parameter: Tensor) -> bool:
        """Return True for an expert, and on the first rank for a parameter that all ranks hold."""
        return self.axis.is_first or parameter in self._parameters

    def held_apart(self) -> dict[nn.Module, Axis]:
        """Return the modules of this rank's experts, which replicas of these hold too."""
        return {module: self.replicas for linears in self._stacks.values() for module in linears.modules()}

    def take_part(self) -> None:
        """Compute the tokens of other ranks in a forward pass for which this rank has no batch."""
        for mixture in self.mixtures:
            mixture.take_part()

    def mark(
        self, model: dict[str, Any], optimizer_state: dict[str, Any], optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state dicts of the whole model and optimizer, with the places of the experts that other ranks hold."""
        numbered = self.held.numbered(optimizer_state)
        pieces = {piece: parameter for parameter, piece in getattr(optimizer, "pieces", {}).items()}
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        of_experts = {
            number
            for number, parameter in zip(self.held.whole_numbers, stepped, strict=True)
            if pieces.get(parameter, parameter) in self._parameters
        }
        prefixes = tuple(f"{name}." for name in self._stacks)
        own = {
            "model": {name: held for name, held in model.items() if name.startswith(prefixes)},
            "state": {number: state for number, state in numbered["state"].items() if number in of_experts},
        }
        own = {kind: in_pieces(held, self.replicas, self._first_rank, self.axis.size) for kind, held in own.items()}
        whole = joined_over(self.axis, own)
        return model | whole["model"], numbered | {"state": numbered["state"] | whole["state"]}

    def own_part(
        self, model: dict[str, Any], optimizer_state: dict[str, Any], optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the part of whole state dicts that this rank holds."""
        return self.held.own_state(model, optimizer_state)


class ExpertsOnRanks(ExpertsForward):
    """Computes the experts of a layer that ranks divide."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._dtype = torch.float32  # of the newest tokens

    def of_experts(self, input_SK: Tensor, expert_S: Tensor) -> Tensor:
        """Return the output of each row's expert, (S, K), of whatever rank. All ranks call it together."""
        self._dtype = input_SK.dtype
        rows = self._agree(input_SK.detach(), expert_S)
        self.num_rows = [sum(of_ranks) for of_ranks in zip(*rows.num_RE, strict=True)]
        received_XK: Tensor = _Dispatched.apply(input_SK, rows)
        returned_SK: Tensor = _Returned.apply(self.multiply(received_XK, rows.num_of_own), rows)
        return returned_SK

    def take_part(self) -> None:
        """Compute the tokens of other ranks, without any of this rank's."""
        no_rows = torch.empty(0, self.up.first.in_features, dtype=self._dtype, device=self.axis.device)
        self.of_experts(no_rows, torch.empty(0, dtype=torch.int64, device=self.axis.device))

    def _agree(self, input_SK: Tensor, expert_S: Tensor) -> "Rows":
        """Return what all ranks send and receive in a pass. The host waits for the device."""
        num_experts = len(self.up)
        inputs, grads = self.up.take_codes, self.down.take_codes and not _has_bias(self.down)
        amax_E = _amax_by_expert(input_SK, expert_S, num_experts) if inputs else input_SK.new_zeros(num_experts)
        num_E = torch.bincount(expert_S, minlength=num_experts)
        are_in_codes = [amax_E.new_full((1,), is_in_codes, dtype=torch.float32) for is_in_codes in (inputs, grads)]
        own = torch.cat([num_E.float(), *are_in_codes, amax_E.float()])
        gathered_RN = self.axis.start_gather(own).wait()
        numbers_RN = gathered_RN[:, : num_experts + 2].long().tolist()
        inputs_agree, grads_agree = (all(numbers[place] for numbers in numbers_RN) for place in (-2, -1))
        return Rows(
            self.axis,
            expert_S,
            [numbers[:num_experts] for numbers in numbers_RN],
            self.up if inputs_agree else None,
            self.down if grads_agree else None,
            gathered_RN[:, num_experts + 2 :].nan_to_num(nan=torch.inf).amax(0),
        )


@dataclass(frozen=True)
class Rows:
    """The rows that ranks send each other in one pass through a mixture.

    expert_S: the experts of this rank's rows, ascending. num_RE: rows of each rank for each expert. inputs, grads: the experts'
    layers that take these in codes; None for values. amax_E: of each expert's inputs, over all ranks.
    """

    axis: Axis
    expert_S: Tensor
    num_RE: list[list[int]]
    inputs: ExpertLinears | None
    grads: ExpertLinears | None
    amax_E: Tensor

    @property
    def own(self) -> range:
        """The experts here."""
        return _share(self.axis, len(self.num_RE[0]))

    @cached_property
    def num_of_own(self) -> list[int]:
        """Rows of all ranks for each expert here."""
        return [sum(num_E[expert] for num_E in self.num_RE) for expert in self.own]

    def send(self, rows_SK: Tensor) -> Tensor:
        """Send each row to the rank of its expert. Returns the rows for the experts here, by expert, then by rank."""
        received = self.axis.exchange_rows(rows_SK, self._num_sent, self._num_received)
        sizes = [num_E[expert] for num_E in self.num_RE for expert in self.own]
        return _reordered(received, sizes, len(self.num_RE))

    def send_back(self, rows_XK: Tensor) -> Tensor:
        """Return the rows of `send` to the ranks that they came from. Returns this rank's, in their order there."""
        sizes = [num_E[expert] for expert in self.own for num_E in self.num_RE]
        return self.axis.exchange_rows(_reordered(rows_XK, sizes, len(self.own)), self._num_received, self._num_sent)

    def send_codes(self, rows_SK: Tensor, scaling: OperandScaling, amax_E: Tensor, divisor: int = 1) -> Operand:
        """Send each row in codes. Returns those for the experts here, with a scale for each expert.

        scaling: of any of the experts. amax_E: of each expert's rows on all ranks. divisor: of the values, a power of two.
        """
        dtype, margin = scaling.format.dtype, scaling.recipe.margin
        codes_SK, _ = kernels.quantize(rows_SK, dtype, "row", margin=margin, amax=amax_E[self.expert_S].unsqueeze(1))
        scales_E = kernels.dequant_scale_from_amax(amax_E[self.own.start : self.own.stop], dtype, margin) / divisor
        return Operand(self.send(codes_SK), scales_E)

    def shape_of(self, rows_SK: Tensor) -> Tensor:
        """Return a tensor that only has the shape of the rows for the experts here."""
        return rows_SK.new_full((), torch.nan).expand(sum(self.num_of_own), rows_SK.shape[1])

    @property
    def _num_sent(self) -> list[int]:
        num_E, size = self.num_RE[self.axis.rank], len(self.own)
        return [sum(num_E[first : first + size]) for first in range(0, len(num_E), size)]

    @property
    def _num_received(self) -> list[int]:
        return [sum(num_E[self.own.start : self.own.stop]) for num_E in self.num_RE]


class _Dispatched(torch.autograd.Function):
    """Rows of all ranks for the experts here. Where these take codes, the result only has their shape."""

    @staticmethod
    def forward(ctx: Any, input_SK: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        if rows.inputs is None:
            return rows.send(input_SK)
        rows.inputs.exchange.input = rows.send_codes(input_SK, rows.inputs.first.input_scaling, rows.amax_E)
        return rows.shape_of(input_SK)

    @staticmethod
    def backward(ctx: Any, grad_XK: Tensor) -> tuple[Tensor, None]:
        rows: Rows = ctx.rows
        return rows.send_back(grad_XK) * rows.axis.size, None


class _Returned(torch.autograd.Function):
    """The outputs of this rank's rows, which other ranks have computed."""

    @staticmethod
    def forward(ctx: Any, output_XK: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return rows.send_back(output_XK)

    @staticmethod
    def backward(ctx: Any, grad_SK: Tensor) -> tuple[Tensor, None]:
        rows: Rows = ctx.rows
        if rows.grads is None:
            return rows.send(grad_SK / rows.axis.size), None
        amax_E = rows.axis.max_(_amax_by_expert(grad_SK, rows.expert_S, len(rows.num_RE[0])))
        scaling = rows.grads.first.grad_output_scaling
        rows.grads.exchange.grad_output = rows.send_codes(grad_SK, scaling, amax_E, rows.axis.size)
        return rows.shape_of(grad_SK), None


def _share(axis: Axis, num_experts: int) -> range:
    """Return the experts of a mixture that this rank holds."""
    size = num_experts // axis.size
    return range(axis.rank * size, (axis.rank + 1) * size)


def _has_bias(linears: ExpertLinears) -> bool:
    """Return True if gradients of biases are needed, which are sums of values."""
    return linears.first.bias is not None


def _amax_by_expert(rows_SK: Tensor, expert_S: Tensor, num_experts: int) -> Tensor:
    """Return the largest magnitude of each expert's rows, fp32 (E); 0 without rows."""
    amax_S = kernels.compute_amax(rows_SK, "row").squeeze(1)
    return amax_S.new_zeros(num_experts).scatter_reduce(0, expert_S, amax_S, "amax")


def _reordered(rows: Tensor, sizes: list[int], num_outer: int) -> Tensor:
    """Return runs of rows in the order of their inner index, then their outer one. sizes: of the runs, by the outer first."""
    runs = rows.contiguous().view(torch.uint8).split(sizes)
    num_inner = len(sizes) // num_outer
    in_order = [runs[outer * num_inner + inner] for inner in range(num_inner) for outer in range(num_outer)]
    return torch.cat(in_order).view(rows.dtype)

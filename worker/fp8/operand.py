"""Quantize one operand of a layer: from the amax of the tensor at hand, or from those of past steps.

Current scaling reads the amax of the tensor at hand. Delayed scaling reads it from a window of past steps: over the
micro-batches of a step the largest value collects in one slot, and `advance`, called after the optimizer's step, moves it
into the window. Until the window is full the scale is exact; a non-finite amax restarts it; evaluation leaves no trace.

With current scaling the op of the product quantizes an operand itself. It is quantized here, before its product, where
something else has to see it: a window, a sample of statistics, layers and ranks that take the same codes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.fp8.casts import KeepsDtypes
from octet.worker.fp8.handoff import NOTHING, Codes, Handoff, amax_in_graph
from octet.worker.fp8.recipe import Recipe
from octet.worker.fp8.stored import keep_in_metadata, kept_in_metadata
from octet.worker.kernels import KnownScale, Operand, QuantizedOperand, ScaledCodes, ScaleKind
from octet.worker.kernels.operands import Scaling
from octet.worker.kernels.sampling import NUM_MEASURES, sampled_rows
from octet.worker.kernels.scales import OperandFormat
from octet.worker.kernels.torch_private import foreach_copy_

REMEMBERED = ("step_amax", "amax_history", "window_amax", "num_finite_steps")
"""The buffers of delayed scaling."""


class OperandScaling(KeepsDtypes):
    """The scaling of one operand of one layer. Its buffers of delayed scaling are in `state_dict`."""

    sample: Tensor
    step_amax: Tensor
    amax_history: Tensor
    window_amax: Tensor
    num_finite_steps: Tensor
    is_written_in_graph = False
    """True if a compiled graph makes the operand in a kernel that can write its codes too."""
    gathered_codes: Codes | None = None
    """Codes of the next operand, gathered from ranks that each had some of its tokens."""
    regather: Callable[[Tensor], Tensor] | None = None
    """Gathers the codes of all tokens (T, K) once more, given the codes that this rank has kept (B, t, K)."""

    def __init__(self, recipe: Recipe, format: OperandFormat, device: torch.device) -> None:
        """format: one of the recipe's three operands."""
        super().__init__()
        self.recipe = recipe
        self.format = format
        self.is_sampled = False  # whether to measure what is quantized next
        self.has_window = recipe.amax_history_length > 0
        self.finds_amax = format.kind is ScaleKind.TENSOR and not self.has_window
        # What was measured since the last optimizer step, NaN if nothing was. Written in place, as a compiled graph can.
        self.register_buffer("sample", torch.full((NUM_MEASURES,), torch.nan, device=device), persistent=False)
        if self.has_window:
            self.register_buffer("step_amax", torch.zeros((), device=device))
            self.register_buffer("amax_history", torch.zeros(recipe.amax_history_length, device=device))
            self.register_buffer("window_amax", torch.zeros((), device=device))
            self.register_buffer("num_finite_steps", torch.zeros((), dtype=torch.int64, device=device))

    def codes_before_product(
        self, x: Tensor, handoff: Handoff | None, *, rows: bool, columns: bool, is_first: bool
    ) -> tuple[Codes | None, Tensor | None]:
        """Return codes of x that exist or are made here; else None and the amax of x, fp32 (), if it is known.

        Existing codes were gathered from the ranks, made by another layer, or written with x.
        is_first: if there are none, quantize x here, and not in the op of the product.
        """
        if self.gathered_codes is not None:
            gathered, self.gathered_codes = self.gathered_codes, None
            return gathered, None
        if not rows and not columns:
            return (None, None), None
        known = NOTHING
        if handoff is not None and self.regather is None:
            if handoff.made and (shared := handoff.shared(self, rows=rows, columns=columns)) is not None:
                return shared, None
            known = handoff.recorded(x, self, is_whole=rows and columns)
        if known.codes is not None and rows:
            written = known.codes if known.codes.shape == x.shape else known.codes.view(x.shape)
            codes = self._complete(x, written, known.amax, known.known_scale, columns=columns)
        elif is_first:
            codes = self.quantize(x, amax=known.amax, rows=rows, columns=columns)
        else:
            return None, known.amax
        if handoff is not None and self.regather is None:
            handoff.share(self, codes)
        return codes, None

    def quantize(self, x: Tensor, *, amax: Tensor | None = None, rows: bool = True, columns: bool = True) -> Codes:
        """Codes of x for products over its rows, and codes of x.T for products over its columns; None if not wanted.

        One read of x makes both. amax: of x, where it is known; of use where the tensor has one scale.
        """
        if not rows and not columns:
            return None, None
        sides = "both" if rows and columns else "rows" if rows else "columns"
        quantized = self._by_window(x, sides, amax) if self.has_window else self._by_own_amax(x, sides, amax)
        if self.is_sampled and self.training:
            self._sample(x, quantized.rows, quantized.columns, None)
        return quantized.rows, quantized.columns

    def weight_operand(self, held: Operand, side: str) -> Operand:
        """Return a weight as its product takes it. side: of the stored matrix, "rows" or "columns".

        The amax of the result, that of the values, is the one to scale by, in the backward pass
        too. It is None unless the tensor has one scale, and in graphs where a window has to find
        it.
        """
        data, stored_scale, amax = held
        is_whole, is_sampled = self.format.kind is ScaleKind.TENSOR, self.is_sampled and self.training
        if not is_whole:
            amax = None
        elif amax is not None and self.has_window:
            amax = self._remembered(amax)
        elif amax is None and not self.has_window:
            amax = amax_in_graph(data) if torch.compiler.is_compiling() else kernels.compute_amax(data)
        if not is_sampled and (amax is not None or not is_whole):
            return held if amax is held.amax else Operand(data, stored_scale, amax)
        if is_whole and amax is None:  # values whose amax the window has to see
            quantized = self._by_window(data, side, None)
            amax = quantized.amax
        else:
            in_units_of_codes = amax if amax is None or stored_scale is None else amax / stored_scale
            quantized = self._by_own_amax(data, side, in_units_of_codes)
        if is_sampled:
            self._sample(data, quantized.rows, quantized.columns, stored_scale)
        codes = quantized.rows or quantized.columns
        assert codes is not None
        scale = codes.dequant_scale if stored_scale is None else codes.dequant_scale * stored_scale
        return Operand(codes.codes, scale, amax)

    def weight_operand_again(self, held: Operand, side: str, amax: Tensor | None) -> Operand:
        """Return a weight as its product takes it in the backward pass. No window is updated, no sample is taken.

        amax: the one that `weight_operand` returned.
        """
        if amax is not None or not self.has_window:
            return held if amax is held.amax else Operand(held.data, held.dequant_scale, amax)
        rows, columns, _ = kernels.quantize_operand(
            held.data,
            self.format.dtype,
            margin=self.recipe.margin,
            sides=side,
            amax=self.window_amax,
            uses_amax=self._is_full(),
        )
        codes = rows or columns
        assert codes is not None
        return Operand(codes.codes, codes.dequant_scale)

    def probe(self, x: Tensor, stored_scale: Tensor | None = None) -> None:
        """Measure how FP8 would hold x, or x * stored_scale, by a scale of its own amax. No window is updated."""
        if self.is_sampled and self.training:
            quantized = self._by_own_amax(x, "rows", None)
            self._sample(x, quantized.rows, None, stored_scale)

    def restart(self) -> None:
        """Forget past steps, as at the start of a run: their window is too old."""
        for name in REMEMBERED if self.has_window else ():
            self.get_buffer(name).zero_()

    def remember_amax(self, amax: Tensor) -> None:
        """Remember an operand that others have quantized by its amax, fp32 ()."""
        if self.has_window and self.training:
            self._remember(amax)

    def activate(self, x: Tensor, activation: str) -> tuple[ScaledCodes, Tensor | None]:
        """Codes of an activation of x for products over its rows, from reads of x alone: its values are written nowhere.

        Also returns the amax that they are scaled by, fp32 (), for the backward pass; None where scales are not the tensor's.
        """
        if self.has_window:
            rows, _, amax = self._by_window(x, "rows", None, activation)
        else:
            scaling = Scaling(self.recipe.margin, "rows")
            rows, _, amax = kernels.activate_operand(x, activation, self.format.dtype, self.format.kind, scaling)
        assert rows is not None
        if self.is_sampled and self.training:
            step = sampled_rows(*x.shape).step
            self._sample(kernels.ACTIVATIONS[activation].forward(x[::step]), rows.every(step), None, None)
        return rows, amax

    def activate_again(self, x: Tensor, activation: str, after: Tensor) -> ScaledCodes:
        """Codes of the activation of x, transposed, where the forward pass made none. Leaves no trace.

        after: as for `kernels.activate_operand`.
        """
        to_scale_by = (self.window_amax, self._is_full()) if self.has_window else (None, None)
        scaling = Scaling(self.recipe.margin, "columns", *to_scale_by)
        columns = kernels.activate_operand(x, activation, self.format.dtype, self.format.kind, scaling, after=after).columns
        assert columns is not None
        return columns

    def known_scale(self) -> KnownScale | None:
        """Return the scale for writing the next operand's codes with its values; None if it is not known before."""
        is_known = self.has_window and self.format.kind is ScaleKind.TENSOR
        if not is_known or self.gathered_codes is not None or self.regather is not None:
            return None
        return KnownScale(self.format.dtype, self.recipe.margin, self.window_amax, self._is_full())

    def is_like(self, other: "OperandScaling") -> bool:
        """Return True if both make the same codes of one tensor, and remember and sample alike."""
        is_same_recipe = self.recipe is other.recipe
        return is_same_recipe and self.training == other.training and self.is_sampled == other.is_sampled

    def follow(self, other: "OperandScaling", amax: Tensor | None = None) -> None:
        """Remember and sample what another scaling has quantized, an operand that both layers share.

        amax: of it, fp32 (); without it the largest that the other has seen in this step, in which it was the last.
        """
        if self.has_window and self.training:
            self._remember(other.step_amax if amax is None else amax)
        if self.is_sampled and self.training:
            self.sample.copy_(other.sample)

    def kept_columns(self, codes: Tensor) -> Tensor:
        """The columns that waited for the backward pass, (K, T), gathered once more where each rank has kept its tokens."""
        return codes if self.regather is None or codes.dim() != 3 else self.regather(codes).t()

    def extra_repr(self) -> str:
        return f"{self.format}, {self.format.kind.value} scales"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        keep_in_metadata(destination, prefix, REMEMBERED)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        """Start afresh where the state dict, of a plain model or another recipe, remembers nothing or in another shape."""
        for name, kept in kept_in_metadata(metadata).items():
            state_dict.setdefault(prefix + name, kept)
        own = {name: buffer for name, buffer in self.named_buffers() if name in REMEMBERED}
        saved = {name: state_dict[prefix + name] for name in REMEMBERED if prefix + name in state_dict}
        is_whole = len(saved) in (0, len(REMEMBERED))  # of a damaged one, torch says what is missing
        if is_whole and {name: part.shape for name, part in saved.items()} != {name: part.shape for name, part in own.items()}:
            for name in saved:
                del state_dict[prefix + name]
            state_dict.update({prefix + name: torch.zeros_like(buffer) for name, buffer in own.items()})
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    def _by_own_amax(self, x: Tensor, sides: str, amax: Tensor | None) -> QuantizedOperand:
        """amax: fp32 (), of x, where it is known."""
        amax = amax if self.format.kind is ScaleKind.TENSOR else None
        margin = self.recipe.margin
        return kernels.quantize_operand(x, self.format.dtype, self.format.kind, margin=margin, sides=sides, amax=amax)

    def _by_window(self, x: Tensor, sides: str, amax: Tensor | None, activation: str | None = None) -> QuantizedOperand:
        """x, or an activation of it, by the window's amax, or its own while the window fills. amax: its own, if it is known.

        The amax of the result is the one that codes are scaled by.
        """
        if torch.compiler.is_compiling():
            return self._by_window_in_graph(x, sides, amax, activation)
        recipe = self.recipe
        held: Any = self._buffers  # a module takes ten times as long to find an attribute
        tensors = held["step_amax"], held["window_amax"], held["num_finite_steps"]
        window = kernels.Window(*tensors, recipe.amax_history_length, recipe.margin, self.training)
        return kernels.quantize_delayed(x, window, self.format.dtype, sides=sides, activation=activation, amax=amax)

    def _by_window_in_graph(self, x: Tensor, sides: str, amax: Tensor | None, activation: str | None) -> QuantizedOperand:
        """`_by_window` by ops that change nothing in place: a graph may compute a forward pass again.

        The result has an amax where it was given one, or is an activation's, which the backward pass takes.
        """
        dtype, margin = self.format.dtype, self.recipe.margin
        if amax is not None:
            amax = self._remembered(amax)
            rows, columns, _ = kernels.quantize_operand(x, dtype, margin=margin, sides=sides, amax=amax)
            return QuantizedOperand(rows, columns, amax)
        is_full = self._is_full()
        if activation is None:
            window = self.window_amax
            rows, columns, own = kernels.quantize_operand(x, dtype, margin=margin, sides=sides, amax=window, uses_amax=is_full)
        else:
            scaling = Scaling(margin, sides, self.window_amax, is_full)
            rows, columns, own = kernels.activate_operand(x, activation, dtype, ScaleKind.TENSOR, scaling)
            assert own is not None
            amax = torch.where(is_full, self.window_amax, own)
        assert own is not None
        if self.training:
            self._remember(own)
        return QuantizedOperand(rows, columns, amax)

    def _complete(
        self, x: Tensor, codes: Tensor, amax: Tensor | None, known_scale: KnownScale | None, *, columns: bool
    ) -> Codes:
        """Return the result of `quantize` for x, made from row codes that were written with x.

        amax: of x. columns: also return codes for products over the columns of x.
        """
        assert amax is not None
        assert known_scale is not None
        made = kernels.complete(codes, x, amax, known_scale, columns=columns)
        if self.training:
            self._remember(amax)
        if self.is_sampled and self.training:
            self._sample(x, made.rows, made.columns, None)
        return made.rows, made.columns

    def _is_full(self) -> Tensor:
        """Return a bool () on the device, true once the window is full; the host does not read it."""
        return self.num_finite_steps >= self.recipe.amax_history_length

    def _remembered(self, amax: Tensor) -> Tensor:
        """Remember an operand's amax and return the one to scale by: the window's once it is full, else its own."""
        if self.training:
            self._remember(amax)
        return torch.where(self._is_full(), self.window_amax, amax)

    def _remember(self, amax: Tensor) -> None:
        """amax: of the values, since a stored scale changes with the weight."""
        if torch.compiler.is_compiling():
            self.step_amax.copy_(torch.maximum(self.step_amax, amax))
        else:
            step_amax: Any = self._buffers["step_amax"]
            torch.maximum(step_amax, amax, out=step_amax)

    def _sample(self, x: Tensor, rows: ScaledCodes | None, columns: ScaledCodes | None, stored_scale: Tensor | None) -> None:
        if rows is not None:
            kernels.measure(x, rows, stored_scale, self.sample)
        elif columns is not None:
            kernels.measure(x.t(), columns, stored_scale, self.sample)


def amaxes_to_scale_by(scalings: Sequence[OperandScaling], own_E: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the amaxes (E,) that operands of layers that are alike are scaled by, given their own: as one by one.

    Windows remember those with rows. counts: the rows of each.
    """
    first = scalings[0]
    if not first.has_window:
        return own_E
    held: list[Any] = [scaling._buffers for scaling in scalings]
    if first.training:
        seen = [index for index, count in enumerate(counts) if count]
        steps, own = [held[index]["step_amax"] for index in seen], own_E.unbind()
        if seen:
            foreach_copy_(steps, list(torch.maximum(torch.stack(steps), torch.stack([own[index] for index in seen])).unbind()))
    window_E, num_finite_E = (torch.stack([each[name] for each in held]) for name in ("window_amax", "num_finite_steps"))
    return torch.where(num_finite_E >= first.recipe.amax_history_length, window_E, own_E)


def advance(scalings: Iterable[OperandScaling]) -> None:
    """Close the slots of this optimizer step, of all windows at once. No device is waited for."""
    alike: dict[tuple[int, Any], list[OperandScaling]] = {}
    for scaling in scalings:
        if scaling.has_window:  # by identity: a recipe takes longer to hash than its window to close
            step_amax: Any = scaling._buffers["step_amax"]
            alike.setdefault((id(scaling.recipe), step_amax.device), []).append(scaling)
    for group in alike.values():
        _advance(group[0].recipe, group)


def _advance(recipe: Recipe, scalings: list[OperandScaling]) -> None:
    """S windows of H steps, all by the same rule."""
    buffers: list[Any] = [scaling._buffers for scaling in scalings]
    held = [[own[name] for own in buffers] for name in REMEMBERED]
    step_amax_S, history_SH, window_amax_S, num_finite_S = map(torch.stack, held)
    was_used_S, finite_S = step_amax_S != 0, torch.isfinite(step_amax_S)
    moved_SH = torch.cat((step_amax_S.unsqueeze(1), history_SH[:, :-1]), 1)
    moved_SH = torch.where(finite_S.unsqueeze(1), moved_SH, 0.0)
    history_SH = torch.where(was_used_S.unsqueeze(1), moved_SH, history_SH)
    num_steps_S = torch.where(was_used_S, torch.where(finite_S, num_finite_S + 1, 0), num_finite_S)
    is_due_S = (num_steps_S % recipe.interval == 0) | (num_steps_S <= recipe.amax_history_length)
    newest_S = history_SH.amax(1) if recipe.amax_compute_algorithm == "max" else history_SH[:, 0]
    window_amax_S = torch.where(is_due_S, newest_S, window_amax_S)
    for kept, values in zip(held, (torch.zeros_like(step_amax_S), history_SH, window_amax_S, num_steps_S), strict=True):
        foreach_copy_(kept, list(values.unbind()))

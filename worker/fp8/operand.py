"""Quantize one operand of a layer: from the amax of the tensor at hand, or from those of past steps.

Current scaling reads the amax of the tensor at hand. Delayed scaling reads it from a window of past steps: over the
micro-batches of a step the largest value collects in one slot, and `advance`, called after the optimizer's step, moves it
into the window. Until the window is full the scale is exact; a non-finite amax restarts it; evaluation leaves no trace.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from worker import kernels
from worker.fp8.accelerator import is_accelerator
from worker.fp8.casts import KeepsDtypes
from worker.fp8.gradient_notes import Notes
from worker.fp8.in_graph import amax_in_graph, codes_in_graph
from worker.fp8.recipe import OperandFormat, Recipe
from worker.kernels import ScaledCodes, ScaleKind
from worker.kernels.operands import Scaling
from worker.kernels.sampling import NUM_MEASURES, sampled_rows

if TYPE_CHECKING:
    from worker.fp8.carried import Carried


def product(a_MK: ScaledCodes, b_NK: ScaledCodes, out_dtype: torch.dtype, *, fast_accumulation: bool = False) -> Tensor:
    """a @ b.T. fast_accumulation: where the hardware has it, and scales of tensors allow it."""
    has_tensor_scales = a_MK.kind is b_NK.kind is ScaleKind.TENSOR
    return kernels.matmul(a_MK, b_NK, out_dtype, fast_accumulation=fast_accumulation and has_tensor_scales)


Codes = tuple[ScaledCodes | None, ScaledCodes | None]
"""Of one operand, for products over its rows and over its columns; None where these are not wanted."""


class ForwardPass(NamedTuple):
    """How a layer computes one forward pass.

    activation: applied to the input first, one of kernels' ACTIVATIONS. codes: of the input, where they are made already.
    notes: those of the backward pass. carried: by the input, where codes may be shared. keeps: autograd is on.
    """

    output_dtype: torch.dtype
    activation: str | None = None
    codes: Codes | None = None
    notes: Notes = Notes()
    carried: "Carried | None" = None
    keeps: bool = True


REMEMBERED = ("step_amax", "amax_history", "window_amax", "num_finite_steps")
"""The buffers of delayed scaling."""


class OperandScaling(KeepsDtypes):
    """The scaling of one operand of one layer. What it remembers is in `state_dict`."""

    sample: Tensor
    step_amax: Tensor
    amax_history: Tensor
    window_amax: Tensor
    num_finite_steps: Tensor
    is_written_in_graph = False
    """Whether a compiled graph makes the operand in a kernel that can write its codes too."""
    given: Codes | None = None
    """Codes of the next operand that ranks have gathered, each of which had some of its tokens."""
    regather: Callable[[Tensor], Tensor] | None = None
    """Gathers the codes of all tokens (T, K) once more, of those that this rank has kept (B, t, K)."""

    def __init__(self, recipe: Recipe, format: OperandFormat, device: torch.device) -> None:
        """format: one of the recipe's three operands."""
        super().__init__()
        self.recipe = recipe
        self.format = format
        self.is_sampled = False  # whether to measure what is quantized next
        # What was measured since the last optimizer step, NaN if nothing was. Written in place, as a compiled graph can.
        self.register_buffer("sample", torch.full((NUM_MEASURES,), torch.nan, device=device), persistent=False)
        if recipe.amax_history_length:
            self.register_buffer("step_amax", torch.zeros((), device=device))
            self.register_buffer("amax_history", torch.zeros(recipe.amax_history_length, device=device))
            self.register_buffer("window_amax", torch.zeros((), device=device))
            self.register_buffer("num_finite_steps", torch.zeros((), dtype=torch.int64, device=device))

    def quantize(
        self,
        x: Tensor,
        *,
        unit: Tensor | None = None,
        amax: Tensor | None = None,
        rows: bool = True,
        columns: bool = True,
        transposed_later: bool = False,
        is_again: bool = False,
    ) -> Codes:
        """Codes of x for products over its rows, and codes of x.T for products over its columns; None if not wanted.

        One read of x makes both. unit: what is quantized is x * unit, where x are themselves codes and unit (), a power of
        two, is their scale. amax: of x * unit, where it is known; of use where the tensor has one scale. transposed_later:
        on a CPU, whose products take any strides, columns may be a view of the rows' codes, where the scale transposes with
        them. is_again: x is quantized a second time in this step, so its amax is known and it is not sampled. A graph whose
        backward pass wrote what each forward pass writes would refuse a second forward pass before it.
        """
        if self.given is not None:
            given, self.given = self.given, None
            return given
        if not rows and not columns:
            return None, None
        is_whole = rows and columns and unit is None
        if self.is_written_in_graph and is_whole and (made := self.write_in_graph(x)) is not None:
            return made
        is_view = columns and transposed_later and self.format.kind.is_transposable and not is_accelerator(x.device)
        sides = "rows" if is_view or not columns else "both" if rows else "columns"
        amax = amax if self.format.kind is ScaleKind.TENSOR else None
        if amax is None and unit is None and self.format.kind is ScaleKind.TENSOR and not self.recipe.amax_history_length:
            amax = amax_in_graph(x)
        is_sampled = self.is_sampled and self.training and not is_again
        if unit is not None and amax is not None and not is_sampled:
            quantized, unit = self._requantize(ScaledCodes(x, unit, self.format.kind), sides, amax), None
        else:
            quantized = self._quantize(x, sides, *self._amax_to_scale_by(unit, amax))
        row_codes, column_codes = quantized.rows, quantized.columns
        if quantized.amax is not None:
            amax = quantized.amax if unit is None else quantized.amax * unit
        if amax is not None and self.recipe.amax_history_length and self.training and not is_again:
            self._remember(amax)
        if is_sampled:
            self._sample(x, row_codes, column_codes, unit)
        if unit is not None:
            row_codes, column_codes = row_codes and row_codes.times(unit), column_codes and column_codes.times(unit)
        if is_view and row_codes is not None:
            column_codes = row_codes.t()
        return row_codes if rows else None, column_codes

    def quantize_by_window(
        self, x: Tensor, sides: str, activation: str | None = None, amax: Tensor | None = None
    ) -> list[Tensor]:
        """What `quantize` and `activate` make of x (M, N) in a pass with delayed scaling that samples nothing, by one op.

        amax: of x, where it is known. Returns codes, as `sides` says, their scale (), and the amax () that they are scaled by.
        """
        held: Any = self._buffers
        tensors, recipe = (held["step_amax"], held["window_amax"], held["num_finite_steps"]), self.recipe
        window = kernels.Window(*tensors, recipe.amax_history_length, recipe.margin, self.training)
        return kernels.quantize_delayed(x, window, self.format.dtype, sides=sides, activation=activation, amax=amax)

    def ahead(self) -> kernels.Ahead | None:
        """How to write codes of the next operand with its values, for `complete`; None where no scale is known before."""
        is_known = self.recipe.amax_history_length and self.format.kind is ScaleKind.TENSOR
        if not is_known or self.given is not None or self.regather is not None:
            return None
        is_full = self.num_finite_steps >= self.recipe.amax_history_length
        return kernels.Ahead(self.format.dtype, self.recipe.margin, self.window_amax, is_full)

    def complete(self, codes: Tensor, x: Tensor, amax: Tensor, ahead: kernels.Ahead, *, columns: bool) -> Codes:
        """What `quantize` makes of x for its rows, and columns if wanted, of codes that were written with x. amax: of x."""
        made = kernels.complete(codes, x, amax, ahead, columns=columns)
        if self.training:
            self._remember(amax)
        if self.is_sampled and self.training:
            self._sample(x, made.rows, made.columns, None)
        return made.rows, made.columns

    def write_in_graph(self, x: Tensor) -> Codes | None:
        """What `quantize` makes of x, in fp32 or bf16, where a compiled graph makes it; None where no scale is known before."""
        if not torch.compiler.is_compiling() or x.dtype not in (torch.float32, torch.bfloat16):
            return None
        ahead, amax = self.ahead(), amax_in_graph(x)
        if ahead is None or amax is None:
            return None
        return self.complete(codes_in_graph(x, ahead), x, amax, ahead, columns=True)

    def activate(self, x: Tensor, activation: str) -> tuple[ScaledCodes, Tensor | None]:
        """Codes of an activation of x for products over its rows, from reads of x alone: its values are written nowhere.

        Also returns the amax that they are scaled by, fp32 (), for `activate_again`; None where scales are not the tensor's.
        """
        amax, uses_amax = self._amax_to_scale_by(None, None)
        rows, _, own_amax = self._activate(x, activation, "rows", amax, uses_amax)
        assert rows is not None
        if own_amax is not None and self.recipe.amax_history_length and self.training:
            self._remember(own_amax)
        if self.is_sampled and self.training:
            step = sampled_rows(*x.shape).step
            self._sample(kernels.ACTIVATIONS[activation].forward(x[::step]), rows.every(step), None, None)
        if own_amax is not None and uses_amax is not None and amax is not None:
            return rows, torch.where(uses_amax, amax, own_amax)
        return rows, own_amax

    def activate_again(self, x: Tensor, activation: str, amax: Tensor | None, after: Tensor) -> ScaledCodes:
        """Codes of the activation of x, transposed, for products over its columns, in the backward pass. Leaves no trace.

        amax: what `activate` returned, so that none is looked for; None where it was not called, or returned None.
        after: as for `kernels.activate_operand`.
        """
        to_scale_by = self._amax_to_scale_by(None, None) if amax is None else (amax, None)
        columns = self._activate(x, activation, "columns", *to_scale_by, after).columns
        assert columns is not None
        return columns

    def follow(self, other: "OperandScaling", amax: Tensor | None = None) -> None:
        """Remember and sample what another scaling has quantized, an operand that both layers share.

        amax: of it, fp32 (); without it the largest that the other has seen in this step, in which it was the last.
        """
        if self.recipe.amax_history_length and self.training:
            self._remember(other.step_amax if amax is None else amax)
        if self.is_sampled and self.training:
            self.sample.copy_(other.sample)

    def kept_columns(self, codes: Tensor, dequant_scale: Tensor) -> ScaledCodes:
        """The columns that waited for the backward pass, (K, T), gathered once more where each rank has kept its tokens."""
        if self.regather is not None and codes.dim() == 3:
            codes = self.regather(codes).t()
        return ScaledCodes(codes, dequant_scale, self.format.kind)

    def extra_repr(self) -> str:
        return f"{self.format}, {self.format.kind.value} scales"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Start afresh where the state dict, of a plain model or another recipe, remembers nothing or in another shape."""
        own = {name: buffer for name, buffer in self.named_buffers() if name in REMEMBERED}
        saved = {name: state_dict[prefix + name] for name in REMEMBERED if prefix + name in state_dict}
        is_whole = len(saved) in (0, len(REMEMBERED))  # of a damaged one, torch says what is missing
        if is_whole and {name: part.shape for name, part in saved.items()} != {name: part.shape for name, part in own.items()}:
            for name in saved:
                del state_dict[prefix + name]
            state_dict.update({prefix + name: torch.zeros_like(buffer) for name, buffer in own.items()})
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _quantize(self, x: Tensor, sides: str, amax: Tensor | None, uses_amax: Tensor | None) -> kernels.QuantizedOperand:
        dtype, kind, margin = self.format.dtype, self.format.kind, self.recipe.margin
        return kernels.quantize_operand(x, dtype, kind, margin=margin, sides=sides, amax=amax, uses_amax=uses_amax)

    def _requantize(self, stored: ScaledCodes, sides: str, amax: Tensor) -> kernels.QuantizedOperand:
        to_scale_by, _ = self._amax_to_scale_by(None, amax)
        assert to_scale_by is not None
        return kernels.requantize(stored, to_scale_by, self.format.dtype, margin=self.recipe.margin, sides=sides)

    def _activate(
        self, x: Tensor, activation: str, sides: str, amax: Tensor | None, uses_amax: Tensor | None, after: Tensor | None = None
    ) -> kernels.QuantizedOperand:
        how = Scaling(self.recipe.margin, sides, amax, uses_amax)
        return kernels.activate_operand(x, activation, self.format.dtype, self.format.kind, how, after=after)

    def _amax_to_scale_by(self, unit: Tensor | None, amax: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return an amax in units of x, and whether to use it instead of x's own.

        The amax is the window's; while the window fills it is the given one, where that is known. (None, None): use x's own
        amax. (amax, None): use the amax.
        """

        def in_units_of_x(amax: Tensor) -> Tensor:
            return amax if unit is None else amax / unit

        if not self.recipe.amax_history_length:
            return (None if amax is None else in_units_of_x(amax)), None
        is_full = self.num_finite_steps >= self.recipe.amax_history_length
        if amax is None:
            return in_units_of_x(self.window_amax), is_full
        return in_units_of_x(torch.where(is_full, self.window_amax, amax)), None

    def _remember(self, amax: Tensor) -> None:
        """amax: of the values, since the unit changes with the weight."""
        if torch.compiler.is_compiling():
            self.step_amax.copy_(torch.maximum(self.step_amax, amax))
        else:
            step_amax: Any = self._buffers["step_amax"]
            torch.maximum(step_amax, amax, out=step_amax)

    def _sample(self, x: Tensor, rows: ScaledCodes | None, columns: ScaledCodes | None, unit: Tensor | None) -> None:
        if rows is not None:
            kernels.measure(x, rows, unit, self.sample)
        elif columns is not None:
            kernels.measure(x.t(), columns, unit, self.sample)


def advance(scalings: Iterable[OperandScaling]) -> None:
    """Close the slots of this optimizer step, of all windows at once. No device is waited for."""
    alike: dict[tuple[int, Any], list[OperandScaling]] = {}
    for scaling in scalings:
        if scaling.recipe.amax_history_length:  # by identity: a recipe takes longer to hash than its window to close
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
        torch._foreach_copy_(kept, list(values.unbind()))

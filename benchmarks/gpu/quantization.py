"""Cases: quantization of bf16 to E4M3, and work on FP8 gradients, as shares of the copy bandwidth.

The bytes counted are those that must be moved. The input is read once, or twice if an element's scale depends on elements
that do not fit on the chip together (the amax of a tensor or of columns). Each output is written once.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.linear import text
from benchmarks.gpu.report import Row, Target
from benchmarks.gpu.session import Case, Session
from octet.worker import kernels
from octet.worker.kernels import LinearFormats, Operand, Operands, ScaledCodes, ScaleKind

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SHARE = Target(0.80, 0.90)
NUM_SETS = 3
NUM_RANKS = 8
NUM_CHECKED_ROWS = 1024
LARGEST_ERROR = 0.05
"""Largest relative error of codes; E4M3 has 2 to 3 % on random data."""

# name, kind of scale, bytes per element for rows alone and for both sides, without scales
Way = tuple[str, ScaleKind, int, int]
WAYS: tuple[Way, ...] = (
    ("tensor, current", ScaleKind.TENSOR, 5, 6),
    ("tensor, given amax", ScaleKind.TENSOR, 3, 4),
    ("row", ScaleKind.ROW, 3, 6),
    ("1x128", ScaleKind.BLOCK_1X128, 3, 4),
    ("128x128", ScaleKind.BLOCK_128X128, 3, 4),
)


SHAPES = ((32768, 16384), (16384, 4096))
VERBS = ("quantize", "quantize+transpose")
EPILOGUES = ((2048, 4096, 4096), (2048, 16384, 4096), (8192, 16384, 4096))
"""Tokens, out features and in features: what would be gained or lost by dense layers (docs/log.md, 2026-11-29)."""


def quantize_cases(session: Session) -> list[Case]:
    """Return the cases: quantize, and quantize with the transposed codes."""
    shapes = ((256, 256),) if session.smoke else SHAPES
    return [
        Case(f"{VERBS[both]} {way[0]}, {shape[0]}×{shape[1]}", partial(_quantize, session, way, shape, both))
        for shape in shapes
        for both in (False, True)
        for way in WAYS
    ]


def gradient_cases(session: Session) -> list[Case]:
    """Return the cases for operations on gradients that are held in FP8."""
    size = 1 << (16 if session.smoke else 28)
    shapes = ((32, 64, 48),) if session.smoke else EPILOGUES
    return [
        *(Case(f"weight gradient {text(shape)}", partial(_epilogue, session, shape)) for shape in shapes),
        Case("norm of FP8 gradients", partial(_norm, session, size)),
        Case("accumulate bf16 onto FP8 gradients", partial(_accumulate, session, size)),
        Case(f"mean of {NUM_RANKS} ranks' shards", partial(_mean, session, size)),
    ]


def _quantize(session: Session, way: Way, shape: tuple[int, int], both: bool) -> Iterator[Row]:
    name, kind, rows_bytes, both_bytes = way
    inputs = [torch.randn(shape, device=session.device).bfloat16() for _ in range(NUM_SETS)]
    amaxes = [kernels.compute_amax(x) if "given" in name else None for x in inputs]
    is_used = torch.ones((), dtype=torch.bool, device=session.device)

    def quantize(number: int) -> list[ScaledCodes]:
        x, amax = inputs[number], amaxes[number]
        if not both:
            codes, dequant_scale = kernels.quantize(x, E4M3, kind.granularity, amax=amax, block=kind.block)
            return [ScaledCodes(codes, dequant_scale, kind)]
        uses_amax = None if amax is None else is_used
        quantized = kernels.quantize_operand(x, E4M3, kind, sides="both", amax=amax, uses_amax=uses_amax)
        return [side for side in (quantized.rows, quantized.columns) if side is not None]

    sides = quantize(0)
    for x, side in zip((inputs[0], inputs[0].t()), sides, strict=False):
        _check(x, side)
    num_bytes = inputs[0].numel() * (both_bytes if both else rows_bytes) + sum(side.dequant_scale.nbytes for side in sides)
    del sides
    yield _share_row(session, f"{VERBS[both]} {name}, {shape[0]}×{shape[1]}", quantize,
                     num_bytes, inputs[0].numel(), SHARE)  # fmt: skip


def _check(x: Tensor, quantized: ScaledCodes) -> None:
    """Raise ValueError if the codes are wrong, so that no wrong kernel is timed. Checks some of the rows."""
    step = max(1, x.shape[0] // NUM_CHECKED_ROWS)
    values, expected = kernels.values_of(quantized.every(step)), x[::step].float()
    error = float((values - expected).norm() / expected.norm())
    if not error < LARGEST_ERROR:
        raise ValueError(f"the codes are off by {error:.1%}; rounding causes at most {LARGEST_ERROR:.0%}. Fix this kernel.")


def _epilogue(session: Session, shape: tuple[int, int, int]) -> Iterator[Row]:
    """Codes of a weight's gradient: by a Triton product whose epilogue finds the amax, and by cuBLASLt's and a pass for it."""
    num_tokens, num_out, num_in = shape
    formats, dtypes, amax = LinearFormats(), (BF16, BF16), torch.full((1,), 6.0, device=session.device)
    weights = Operands([torch.zeros(num_out, num_in, device=session.device)], [], [amax[0]])
    sets = []
    for _ in range(NUM_SETS):
        grad, x = (torch.randn(num_tokens, size, device=session.device).bfloat16() for size in (num_out, num_in))
        _, *of_run = kernels.grouped_output(Operand(x, None, amax), [num_tokens], weights, formats, BF16, keeps_columns=True)
        codes, dequant_scale = of_run
        sets.append((grad, Operand(*of_run), Operand(codes[:, :num_tokens].contiguous(), dequant_scale[0])))

    def by_epilogue(number: int) -> tuple[Tensor, Tensor]:
        grad, kept, _ = sets[number]
        known = Operand(grad, None, amax)
        made = kernels.grouped_gradients(known, [num_tokens], kept, weights, formats, "columns", dtypes, finds_amax=True)
        return kernels.quantize_gradients(*made, E4M3)

    def by_pass(number: int) -> tuple[Tensor, Tensor]:
        grad, _, kept = sets[number]
        known = Operand(grad, None, amax[0])
        (made,) = kernels.linear_gradients(known, None, kept, None, formats, "columns", dtypes)
        return kernels.quantize_gradient(made, E4M3)

    (codes, scales), (expected, dequant_scale) = by_epilogue(0), by_pass(0)
    of_pass = kernels.values_of(ScaledCodes(expected, dequant_scale, ScaleKind.TENSOR))
    _check(of_pass, ScaledCodes(codes[0], scales[0], ScaleKind.TENSOR))
    ours, cublas = (session.timer.measure(call, NUM_SETS) for call in (by_epilogue, by_pass))
    figure = f"weight gradient {text(shape)}, amax in the epilogue"
    yield Row(figure, str(ours), f"cuBLASLt and a pass: {cublas}", cublas.median_s / ours.median_s)


def _norm(session: Session, size: int) -> Iterator[Row]:
    sets = [_codes(session, (size,)) for _ in range(NUM_SETS)]
    yield _share_row(
        session, "norm of FP8 gradients", lambda number: kernels.norms(*([part] for part in sets[number])), size, size
    )


def _accumulate(session: Session, size: int) -> Iterator[Row]:
    sets = [_codes(session, (size,)) for _ in range(NUM_SETS)]
    others = [torch.randn(size, device=session.device).bfloat16() for _ in range(NUM_SETS)]

    def accumulate(number: int) -> None:
        kernels.accumulate_(*sets[number], others[number], 1e-3, (0, 1, 0))

    yield _share_row(session, "accumulate bf16 onto FP8 gradients", accumulate, 7 * size, size)


def _mean(session: Session, size: int) -> Iterator[Row]:
    sets = []
    for _ in range(NUM_SETS):
        codes, dequant_scale = _codes(session, (NUM_RANKS, size // NUM_RANKS))
        sets.append((codes, dequant_scale.repeat(NUM_RANKS)))
    name = f"mean of {NUM_RANKS} ranks' shards"
    num_bytes = size + 4 * size // NUM_RANKS
    yield _share_row(session, name, lambda number: kernels.mean_of_shards(*sets[number]), num_bytes, size)


def _codes(session: Session, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    codes, dequant_scale = kernels.quantize(torch.randn(shape, device=session.device).bfloat16(), E4M3)
    return codes, dequant_scale


def _share_row(
    session: Session,
    figure: str,
    call: Callable[[int], object],
    num_bytes: int,
    num_elements: int,
    target: Target | None = None,
) -> Row:
    timing = session.timer.measure(call, NUM_SETS)
    return Row(
        figure,
        f"{timing}, {num_bytes / timing.median_s / 1e12:.2f} TB/s",
        f"copy {session.ceilings.copy_bytes_per_s / 1e12:.2f} TB/s",
        session.ceilings.share_of_copy(num_bytes, timing),
        target,
        f"{num_bytes / num_elements:.2f} bytes per element; the host takes {timing.host_s * 1e3:.2f} ms",
    )

"""Cases: forward and backward of one linear layer, including quantization, compared with bf16 and with torchao's layer.

All layers hold a bf16 weight and take bf16 inputs and output gradients. FP8 layers are compiled, as in training. Layers are
timed with alternating inputs, and nothing is left over from the previous call.
"""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn

from benchmarks.gpu.networks import ROWWISE, in_fp8
from benchmarks.gpu.report import Row, Target
from benchmarks.gpu.session import Case, Session, missing
from benchmarks.gpu.timing import Timer, Timing
from octet.api_schemas.recipe import RecipeSpec
from octet.worker import initialize

NUM_SETS = 3
SHAPES = ((8192, 4096, 4096), (8192, 8192, 8192), (16384, 4096, 16384), (16384, 8192, 8192))  # M, K, N
SMALL = ((64, 32, 48),)
WAYS = {  # name: the level, its recipe, and the target
    "tensor": ("te", RecipeSpec(), Target(1.55, 1.70)),
    "block": ("te", RecipeSpec(granularity="block"), Target(1.40, 1.50)),
    "row": ("te", RecipeSpec(granularity="row"), None),
    "torchao tensorwise": ("ao", RecipeSpec(), None),
    "torchao rowwise": ("ao", ROWWISE, None),
}
SAME_SCALES = {"tensor": "torchao tensorwise", "row": "torchao rowwise"}


def linear_cases(session: Session) -> list[Case]:
    """Return the cases by shape: bf16, torchao's layer, our layer."""
    cases = []
    for shape in SMALL if session.smoke else SHAPES:
        taken: dict[str, Timing] = {}
        cases.append(Case(f"linear {text(shape)}, bf16", partial(_in_bf16, session, shape, taken)))
        for name in sorted(WAYS, key=lambda name: not name.startswith("torchao")):
            cases.append(Case(f"linear {text(shape)}, {name}", partial(_in_fp8, session, shape, name, taken), expected_s=8))
    return cases


def _in_bf16(session: Session, shape: tuple[int, int, int], taken: dict[str, Timing]) -> Iterator[Row]:
    taken["bf16"] = time_layer(session.timer, _layer(session, shape), shape)
    flops_per_s = _flops(shape) / taken["bf16"].median_s
    ceiling = session.ceilings.gemm_flops_per_s
    figure = f"linear {text(shape)}, bf16"
    reference = f"bf16 GEMM {ceiling / 1e12:.0f} TFLOP/s"
    yield Row(figure, f"{taken['bf16']}, {flops_per_s / 1e12:.0f} TFLOP/s", reference, flops_per_s / ceiling)


def _in_fp8(session: Session, shape: tuple[int, int, int], name: str, taken: dict[str, Timing]) -> Iterator[Row]:
    level, recipe, target = WAYS[name]
    figure = f"linear {text(shape)}, {name}"
    if level == "ao" and find_spec("torchao") is None:
        yield missing(figure, "torchao")
        return
    options = {"recipe": recipe, "statistics_every": 0, **in_fp8(level)}
    model, _ = initialize(nn.Sequential(_layer(session, shape)), None, level, **options)
    torch.compiler.reset()
    model.compile(backend="aot_eager" if session.smoke else "inductor", dynamic=False)
    timing = taken[name] = time_layer(session.timer, model, shape)
    measured = f"{timing}, {_flops(shape) / timing.median_s / 1e12:.0f} TFLOP/s"
    if "bf16" not in taken:
        yield Row(figure, measured, note="bf16 was not measured in this run")
        return
    yield Row(figure, measured, f"bf16 {taken['bf16']}", taken["bf16"].median_s / timing.median_s, target)
    if SAME_SCALES.get(name) in taken:
        other = taken[SAME_SCALES[name]]
        yield Row(f"{figure} against {SAME_SCALES[name]}", str(timing), str(other), other.median_s / timing.median_s)


def _layer(session: Session, shape: tuple[int, int, int]) -> nn.Linear:
    _, in_features, out_features = shape
    return nn.Linear(in_features, out_features, bias=False, device=session.device, dtype=torch.bfloat16)


def time_layer(timer: Timer, layer: nn.Module, shape: tuple[int, int, int]) -> Timing:
    """Time forward and backward on random bf16 inputs and output gradients."""
    rows, in_features, out_features = shape
    inputs = [torch.randn(rows, in_features, device=timer.device).bfloat16().requires_grad_() for _ in range(NUM_SETS)]
    grad_outputs = [torch.randn(rows, out_features, device=timer.device).bfloat16() for _ in range(NUM_SETS)]
    parameters = list(layer.parameters())

    def forward_and_backward(number: int) -> None:
        inputs[number].grad = None
        for parameter in parameters:
            parameter.grad = None
        layer(inputs[number]).backward(grad_outputs[number])

    timing = timer.measure(forward_and_backward, NUM_SETS)
    assert all(tensor.grad is not None for tensor in parameters), "the layer made no gradient for its weight"
    return timing


def _flops(shape: tuple[int, int, int]) -> int:
    rows, in_features, out_features = shape
    return 6 * rows * in_features * out_features


def text(shape: tuple[int, int, int]) -> str:
    """Return a shape as rows name it."""
    return "×".join(str(size) for size in shape)

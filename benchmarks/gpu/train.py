"""Time training steps on one GPU: speed and peak memory of GPTs, the largest that trains, the memory of vision models.

    python -m benchmarks.gpu.train [--out FOLDER] [--sections gpt,memory] [--smoke]

writes a dated table. Every way to train has the same network, batch and loop; blocks are compiled. Section "Cost of statistics"
compares steps that sample them with steps that do not; "CUDA graphs" replays the steps of bf16-amp and O2, against the same
steps launched by the host; "Job" compares jobs through `octet.worker.rank.main` with bare loops (`job.py`); "Memory with
options" has peaks of eager steps. The vision models are Swin-1.0B and ViT-1.2B.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.largest import largest_cases
from benchmarks.gpu.networks import (
    AO_ROWWISE,
    AO_TENSORWISE,
    BF16_AMP,
    FP16_AMP,
    GRAPHED,
    O1,
    O2,
    O2_ALL_FP8,
    O3_SPLIT,
    SEQUENCE_LENGTH,
    TE,
    VOCABULARY,
    Way,
    build_gpt,
    gpt_step,
    peak_bytes_of,
    vision_step,
)
from benchmarks.gpu.report import Report, Row, Target
from benchmarks.gpu.session import Case, Section, Session, chosen_names, missing, parser, run
from benchmarks.gpu.timing import Timer, Timing
from octet.api_schemas import GPTSizes, PrecisionSpec
from octet.api_schemas.models.gpt import gpt_sizes

SIZES_WITH_MEMORY_TARGET = ("1.3 B", "tiny")
JOB_PACKAGES = ("safetensors", "prometheus_client", "pynvml", "httpx")
NUM_STEPS = 12
WARMUP_STEPS = 4
OOM_BATCHES = 2  # how often a batch is halved when bf16-amp runs out of memory
AGAINST_AO, MEMORY = Target(1.0, 1.1), Target(0.60, 0.42, lower_is_better=True)
FLOPS, IN_TFLOPS = Target(600, 750, style=".0f"), "targets: TFLOP/s"  # of the 6.7 B step at O2
STATISTICS = Target(0.01, 0.005, lower_is_better=True, style=".2%")
SAMPLED = Way("O2, statistics in each step", "O2", options={"statistics_every": 1})
SAVINGS = {"fused_loss": True, "saved_activations": "fp8", "gradient_release": True, "gradient_clip": None}
WITH_OPTIONS = [
    Way(f"{level}, fused loss, activations in FP8, gradient release", level, savings=SAVINGS) for level in ("O2", "O2-8bit")
]
SAVED = {"Swin": Target(0.44, 0.55, style=".0%"), "ViT": Target(0.26, 0.40, style=".0%")}


@dataclass(frozen=True)
class Size:
    """A GPT, its sequences per step, and O2's target speed relative to bf16-amp."""

    name: str
    config: GPTSizes
    batch_size: int
    speed: Target


@dataclass(frozen=True)
class Measured:
    """The measurements of one way to train."""

    timing: Timing
    tokens_per_s: float
    peak_bytes: int
    batch_size: int


SIZES = (
    Size(
        "1.3 B",
        gpt_sizes(2048, 24, 16, VOCABULARY, SEQUENCE_LENGTH),
        4,
        Target(1.20, 1.30),
    ),
    Size(
        "350 M",
        gpt_sizes(1024, 24, 16, VOCABULARY, SEQUENCE_LENGTH),
        8,
        Target(1.05, 1.15),
    ),
    Size(
        "6.7 B",
        gpt_sizes(4096, 32, 32, VOCABULARY, SEQUENCE_LENGTH),
        2,
        Target(1.30, 1.45),
    ),
)
SMALL = (
    Size(
        "tiny",
        gpt_sizes(64, 2, 2, 256, 32),
        2,
        Target(1.20, 1.30),
    ),
)
Found = dict[tuple[str, str], Measured]


def sections(session: Session, _report: Report) -> list[Section]:
    """Return the sections. bf16-amp and O2 of all sizes come before torchao's, which take long to compile."""
    wanted = chosen_names("--sizes", session.options.sizes, [size.name for size in SIZES])
    sizes, found = (SMALL if session.smoke else [size for size in SIZES if size.name in wanted]), Found()
    first = [(size, way) for size in sizes for way in (BF16_AMP, O2)]
    first += [(size, way) for size in sizes for way in (AO_TENSORWISE, AO_ROWWISE)]
    first += [(size, FP16_AMP) for size in sizes if size.name in SIZES_WITH_MEMORY_TARGET]
    largest = [size for size in sizes if size.name in SIZES_WITH_MEMORY_TARGET]
    options = [(size, way) for size in largest for way in WITH_OPTIONS]
    others = [(size, way) for size in sizes for way in ((O3_SPLIT,) if session.smoke else (O3_SPLIT, TE, O1))]
    return [
        Section("GPT step", [_gpt_case(session, size, way, found) for size, way in first], share=0.4),
        Section("Cost of statistics", [_statistics_case(session, size, found) for size in largest], share=0.09),
        Section("CUDA graphs", [_graph_case(session, size, way, found) for size in sizes for way in GRAPHED], share=0.07),
        Section("Job", _job_cases(session), share=0.17),
        Section("Memory with options", [_option_case(session, size, way, found) for size, way in options], share=0.08),
        Section("Memory of vision models", _vision_cases(session), share=0.115),
        Section("Largest GPT", largest_cases(session), share=0.29),
        Section("Other levels", [_gpt_case(session, size, way, found) for size, way in others], share=0.05),
    ]


def _job_cases(session: Session) -> list[Case]:
    """Return the cases of jobs, or the one that says which package of theirs is missing; bare loops need none of them."""
    package = next((name for name in JOB_PACKAGES if importlib.util.find_spec(name) is None), None)
    if package is not None:
        return [Case("job", lambda: iter([missing("job: throughput", package)]), expected_s=0.0)]
    from benchmarks.gpu.job import job_cases

    return job_cases(session)


def _gpt_case(session: Session, size: Size, way: Way, found: Found) -> Case:
    return Case(f"GPT {size.name}, {way.name}", partial(_gpt, session, size, way, found), expected_s=15)


def _gpt(session: Session, size: Size, way: Way, found: Found) -> Iterator[Row]:
    figure = f"GPT {size.name}, {way.name}"
    if way.package and importlib.util.find_spec(way.package) is None:
        yield missing(figure, way.package)
        return
    base = found.get((size.name, BF16_AMP.name))
    measured = _measure_gpt(session, size, way, base.batch_size if base else size.batch_size)
    found[size.name, way.name] = measured
    num_parameters = build_gpt(size.config, torch.device("meta")).num_parameters
    flops_per_s = 6 * num_parameters * measured.tokens_per_s
    speed = f"{measured.tokens_per_s:,.0f} tokens/s, step {measured.timing}"
    note = f"{num_parameters:,} parameters, {measured.batch_size} × {size.config.max_sequence_length} tokens; "
    note += f"{flops_per_s / 1e12:.0f} TFLOP/s at 6 per parameter and token"
    if base is None:
        yield Row(f"{figure}: speed", speed, note=note)
        yield Row(f"{figure}: peak memory", _gib(measured.peak_bytes))
        return
    is_ours = way == O2
    ratio = measured.tokens_per_s / base.tokens_per_s
    yield Row(f"{figure}: speed", speed, f"bf16-amp {base.tokens_per_s:,.0f}", ratio, size.speed if is_ours else None, note)
    if is_ours and size.name == "6.7 B":
        yield Row(f"{figure}: model TFLOP/s", speed, IN_TFLOPS, flops_per_s / 1e12, FLOPS)
    ours = found.get((size.name, O2.name))
    if way in (AO_TENSORWISE, AO_ROWWISE) and ours:
        ratio, own = ours.tokens_per_s / measured.tokens_per_s, f"{ours.tokens_per_s:,.0f} tokens/s, step {ours.timing}"
        yield Row(f"GPT {size.name}, O2: speed", own, f"{way.name} {measured.tokens_per_s:,.0f}", ratio, AGAINST_AO)
    if way == FP16_AMP and ours:
        ratio, reference = ours.peak_bytes / measured.peak_bytes, f"{way.name} {_gib(measured.peak_bytes)}"
        yield Row(f"GPT {size.name}, O2: peak memory", _gib(ours.peak_bytes), reference, ratio, MEMORY)
    target = MEMORY if (is_ours or way in WITH_OPTIONS) and size.name in SIZES_WITH_MEMORY_TARGET else None
    ratio, reference = measured.peak_bytes / base.peak_bytes, f"bf16-amp {_gib(base.peak_bytes)}"
    yield Row(f"{figure}: peak memory", _gib(measured.peak_bytes), reference, ratio, target)


def _statistics_case(session: Session, size: Size, found: Found) -> Case:
    return Case(f"GPT {size.name}, cost of statistics", partial(_statistics, session, size, found), expected_s=30)


def _statistics(session: Session, size: Size, found: Found) -> Iterator[Row]:
    """Time steps that sample statistics, and say what one in the default interval costs."""
    plain = found.get((size.name, O2.name)) or _measure_gpt(session, size, O2, size.batch_size)
    found[size.name, O2.name] = plain  # the section of CUDA graphs compares it with replayed steps
    sampled = _measure_gpt(session, size, SAMPLED, plain.batch_size)
    more, every = plain.tokens_per_s / sampled.tokens_per_s - 1, PrecisionSpec(level=O2.level).resolved_statistics_every
    note = f"a step that samples takes {more:+.0%}; one in {every} does. Reading the samples is not in it"
    yield Row(
        f"GPT {size.name}, O2: cost of statistics",
        f"step that samples {sampled.timing}",
        f"step that does not {plain.timing}",
        more / every,
        STATISTICS,
        note,
    )


def _option_case(session: Session, size: Size, way: Way, found: Found) -> Case:
    return Case(f"GPT {size.name}, {way.name}", partial(_with_options, session, size, way, found), expected_s=20)


def _with_options(session: Session, size: Size, way: Way, found: Found) -> Iterator[Row]:
    if (size.name, BF16_AMP.name) not in found:
        yield from _gpt(session, size, BF16_AMP, found)
    yield from _gpt(session, size, way, found)


def _graph_case(session: Session, size: Size, way: Way, found: Found) -> Case:
    return Case(f"GPT {size.name}, {way.name}", partial(_graph, session, size, way, found), expected_s=15)


def _graph(session: Session, size: Size, way: Way, found: Found) -> Iterator[Row]:
    """Time replayed steps against the same steps launched by the host, and against bf16-amp's replayed ones."""
    figure, first = f"GPT {size.name}, {way.name}: speed", GRAPHED[0].name
    launched, base = found.get((size.name, way.name.partition(",")[0])), found.get((size.name, first))
    batch_size = launched.batch_size if launched else size.batch_size
    measured = found[size.name, way.name] = _measure_gpt(session, size, way, batch_size)
    speed = f"{measured.tokens_per_s:,.0f} tokens/s, step {measured.timing}"
    if launched is None and base is None:
        yield Row(figure, speed)
    if launched is not None:
        yield Row(
            figure, speed, f"launched by the host {launched.tokens_per_s:,.0f}", measured.tokens_per_s / launched.tokens_per_s
        )
    if base is not None:
        yield Row(figure, speed, f"{first} {base.tokens_per_s:,.0f}", measured.tokens_per_s / base.tokens_per_s)


def _measure_gpt(session: Session, size: Size, way: Way, batch_size: int) -> Measured:
    timer = session.timer if session.smoke else Timer(session.device, repeats=NUM_STEPS, warmup=WARMUP_STEPS)
    for _ in range(OOM_BATCHES):
        try:
            return _measure_steps(session, size, way, batch_size, timer)
        except torch.OutOfMemoryError:
            if way != BF16_AMP or batch_size == 1:
                raise
        session.timer.release()
        batch_size //= 2
    return _measure_steps(session, size, way, batch_size, timer)


def _measure_steps(session: Session, size: Size, way: Way, batch_size: int, timer: Timer) -> Measured:
    compiled = "aot_eager" if session.smoke else "inductor"
    try:
        step, held = gpt_step(size.config, way, batch_size, session.device, compiled=compiled)
        timing = timer.consecutive(step)
        peak_bytes = peak_bytes_of(step, held, session.device)
    finally:
        torch.compiler.reset()  # compiled code may hold the network
    tokens_per_s = batch_size * size.config.max_sequence_length / timing.median_s
    return Measured(timing, tokens_per_s, peak_bytes, batch_size)


def _vision_cases(session: Session) -> list[Case]:
    found: dict[tuple[str, str], int] = {}
    return [
        Case(f"{family}, {way.name}", partial(_vision, session, family, way, found), expected_s=10)
        for family in ("Swin", "ViT")
        for way in (FP16_AMP, O2, O2_ALL_FP8)
    ]


def _vision(session: Session, family: str, way: Way, found: dict[tuple[str, str], int]) -> Iterator[Row]:
    name = {"Swin": "Swin-1.0B at batch 16", "ViT": "ViT-1.2B at batch 64"}[family]
    figure = f"{name}, {way.name}: peak memory"
    if importlib.util.find_spec("transformers") is None:
        yield missing(figure, "transformers")
        return
    step, held = vision_step(family, way, session.device, smoke=session.smoke)
    peak = found[family, way.name] = peak_bytes_of(step, held, session.device)
    other = found.get((family, FP16_AMP.name))
    if way == FP16_AMP or other is None:
        yield Row(figure, _gib(peak))
        return
    yield Row(f"{figure} saved", _gib(peak), f"fp16-amp {_gib(other)}", 1 - peak / other, SAVED[family])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", default="1.3,350,6.7", help="beginnings of the GPTs' names, separated by commas")
    return run("train", "Training steps on one GPU", arguments.parse_args(), sections)


if __name__ == "__main__":
    raise SystemExit(main())

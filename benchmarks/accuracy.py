"""Compare the final losses of all levels with fp32's, paired by seed: a small Llama on the Python standard library's source.

    python -m benchmarks.accuracy --seeds 5 --runs FOLDER

First it measures how far fp32's own final loss moves when its initial values change by a thousandth. A setting where that is
more than a third of the smallest limit is refused. Then every level runs from the same start on the same batches as fp32, for
each seed. --out gets a dated table of mean gaps with 95 % intervals, and a plot of the mean curves.
Runs that are finished are kept in FOLDER. The test suite runs a short version of the same `train_curve`.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from benchmarks.curves import Run, Setting, draw, gap, load_source_text, mean_curve, train_curve
from benchmarks.figures import OUT, Figure, add_write_option, write
from benchmarks.hopper_sums import hopper_sums
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models.llama import llama_sizes
from octet.api_schemas.paired import START_CHANGE, Interval, gaps, moved_by_chance, why_not_calm
from octet.api_schemas.recipe import RecipeSpec
from octet.worker.data.windows import TokenWindows
from octet.worker.fp8.accelerator import cpu_as_accelerator

LIMIT, LIMIT_OF_FEWER_BITS = 0.0025, 0.004
SETTING_OPTIONS: Mapping[str, Any] = {"hidden_size": 128, "num_layers": 3, "batch_size": 8, "steps": 150, "learning_rate": 5e-4}
"""Options of the command, with the setting that showed to be calm."""


def small_llama(hidden_size: int = 128, num_layers: int = 3, **changes: Any) -> Setting:
    """Build the setting: a Llama with four heads and an MLP of 2.75 times its width. changes: other fields of `Setting`."""
    sizes = llama_sizes((hidden_size, 11 * hidden_size // 4), num_layers, (4, 4), 256, 128, tied=False)
    steps = changes.pop("steps", 150)
    return Setting(sizes, steps=steps, warmup_steps=max(1, steps // 10), **changes)


@dataclass(frozen=True)
class Variant:
    """A level, with options of `PrecisionSpec` that change one ingredient, or with an option that saves memory.

    as_accelerator: layers return 16 bits, and sums between them are fp32, as on an accelerator. as_hopper: products in FP8 are
    summed as in its tensor cores (`hopper_sums`).
    """

    level: str
    options: Mapping[str, Any] = field(default_factory=dict)
    saves_in_fp8: bool = False
    residual_in_bf16: bool = False
    as_accelerator: bool = False
    as_hopper: bool = False


def _te(**recipe: Any) -> Variant:
    own = LEVELS["te"].recipe
    assert own is not None
    return Variant("te", {"recipe": RecipeSpec.model_validate(own.model_dump() | recipe)})


VARIANTS: Mapping[str, Variant] = {name: Variant(name) for name in LEVELS} | {
    "te-window-16": _te(amax_history_length=16),
    "te-e4m3": _te(format="E4M3"),
    "te-output-bf16": _te(high_precision_gemms=("output",)),
    "te-backward-bf16": _te(high_precision_gemms=("grad_input", "grad_weight")),
    "O2-wide-gradient": Variant("O2", {"gradient_accumulation": "fp32"}),
    "O3-split-wide-gradient": Variant("O3-split", {"gradient_accumulation": "fp32"}),
    "O2-saved-fp8": Variant("O2", saves_in_fp8=True),
    "O2-accelerator": Variant("O2", as_accelerator=True),
    "O2-hopper": Variant("O2", as_hopper=True),
    "O2-hopper-fast": Variant("O2", {"recipe": RecipeSpec(fast_grad_input=True)}, as_hopper=True),
    "O2-residual-bf16": Variant("O2", residual_in_bf16=True, as_accelerator=True),
}
CONTRASTS = (
    ("bf16-amp", "te", "FP8 products"),
    ("te", "ao", "torchao's scales, which are no powers of two"),
    ("te", "te-window-16", "scales from the 16 steps before; te's own window of 1024 is not full, so its scales are exact"),
    ("te", "te-e4m3", "output gradients in E4M3"),
    ("te", "te-output-bf16", "the forward product in bf16"),
    ("te", "te-backward-bf16", "both backward products in bf16"),
    ("te", "O1", "FP16 weights with a scale, FP8 gradients"),
    ("te", "O2", "these, and moments in FP8 and FP16"),
    ("O1", "O2", "moments in FP8 and FP16"),
    ("O2", "O2-wide-gradient", "gradients in fp32"),
    ("O2", "O2-saved-fp8", "what blocks keep for the backward pass in FP8"),
    ("O2", "O2-accelerator", "activations in bf16, as on an accelerator"),
    ("O2", "O2-hopper", "the shorter sums of Hopper's tensor cores"),
    ("O2-hopper", "O2-hopper-fast", "fast accumulation for gradients of inputs"),
    ("O2-accelerator", "O2-residual-bf16", "the residual stream, and what norms return, in bf16"),
    ("O2", "O3", "E4M3 weights with an FP16 master"),
    ("O2", "O3-split", "E4M3 weights with an INT8 residual"),
    ("O3", "O3-split", "an INT8 residual instead of an FP16 master"),
    ("O3-split", "O3-split-wide-gradient", "gradients in fp32"),
    ("O2", "O2-8bit", "both moments in 8 bits"),
    ("O3-split", "O3-split-8bit", "both moments in 8 bits"),
)
"""Pairs that differ in one ingredient, and the ingredient that the second has."""


@dataclass(frozen=True)
class Runs:
    """Finished runs in a folder, one file each: by variant, seed and setting."""

    folder: Path
    data: TokenWindows

    def get(self, variant: str, setting: Setting) -> Run:
        """Return the run, trained now unless it is there."""
        digest = sha256(repr(setting).encode()).hexdigest()[:12]
        kept = self.folder / f"{variant}-seed{setting.seed}-{digest}.json"
        if kept.exists():
            return Run(**json.loads(kept.read_text()))
        trained = VARIANTS[variant]
        savings = {"saves_in_fp8": trained.saves_in_fp8, "residual_in_bf16": trained.residual_in_bf16}
        with ExitStack() as stack:
            for is_wanted, enter in ((trained.as_accelerator, cpu_as_accelerator), (trained.as_hopper, hopper_sums)):
                if is_wanted:
                    stack.enter_context(enter())
            run = replace(train_curve(trained.level, setting, self.data, **savings, **trained.options), level=variant)
        kept.write_text(json.dumps(asdict(run)))
        return run


def limit_of(variant: str) -> float:
    """The largest mean gap to fp32 that a level may have, to either side: larger with weights or second moments of 8 bits."""
    row = LEVELS[VARIANTS[variant].level]
    return LIMIT_OF_FEWER_BITS if row.weight == "fp8" or row.exp_avg_sq == "uint8-companded" else LIMIT


def final_losses(runs: Sequence[Run]) -> list[float]:
    """The final loss of each seed."""
    return [run.final_loss for run in runs]


def table(by_variant: Mapping[str, Sequence[Run]], changed_start: Sequence[Run], setting: Setting, command: str) -> str:
    """Format the report in Markdown. by_variant: one run for each seed; fp32 is among them."""
    references = final_losses(by_variant["fp32"])
    chance = gaps(final_losses(changed_start), references)
    moved = moved_by_chance(final_losses(changed_start), references)
    num_seeds, num_parameters = len(references), sum(each.numel() for each in setting.build_model().parameters())
    lines = [
        f"# Accuracy of the levels, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`{command}` on {platform.machine()} ({torch.backends.cpu.get_cpu_capability()}), {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} thread; torch {torch.__version__}, Python {platform.python_version()}.",
        f"{type(setting.build_model()).__name__} of {num_parameters:,} parameters (hidden {setting.sizes.hidden_size}, "
        f"{setting.sizes.num_layers} layers), {setting.steps} steps of {setting.batch_size} × "
        f"{setting.sizes.max_sequence_length} bytes of the standard library's source, learning rate {setting.learning_rate:g}, "
        f"{num_seeds} seeds. Final loss: mean of the last tenth of the steps, nats per byte. Intervals: 95 %, Student's t.",
        "",
        f"**Noise of the setting.** fp32 from a start changed by {START_CHANGE:g} of each value ends "
        f"{', '.join(f'{100 * each:+.3f}' for each in chance)} % away (by seed); on average {moved:.3%}. "
        f"A third of the smallest limit is {LIMIT / 3:.3%}: the setting is calm.",
        "",
        "## Gap to fp32",
        "",
        "| level | final loss | gap to fp32 | by seed, % | limit | within it | bytes/param | median step (s) |",
        "| --- | ---: | ---: | --- | ---: | --- | ---: | ---: |",
    ]
    for variant, runs in by_variant.items():
        lines.append(_row(variant, runs, references))
    lines += [
        "",
        "## One ingredient at a time",
        "",
        "| from | to | what changes | difference | |",
        "| --- | --- | --- | ---: | --- |",
    ]
    for before, after, change in CONTRASTS:
        if before in by_variant and after in by_variant:
            difference = Interval.of(gaps(final_losses(by_variant[after]), final_losses(by_variant[before])))
            shown = "not distinct from zero" if difference.is_zero else "better" if difference.mean < 0 else "worse"
            lines.append(f"| {before} | {after} | {change} | {difference} | {shown} |")
    return "\n".join(lines) + "\n"


def figures(by_variant: Mapping[str, Sequence[Run]], setting: Setting) -> list[Figure]:
    """Return each level's mean gap to fp32, and the differences of CONTRASTS."""
    model, references = setting.build_model(), final_losses(by_variant["fp32"])
    num_parameters = sum(each.numel() for each in model.parameters())
    trained = f"{type(model).__name__} of {num_parameters:,} parameters, {setting.steps} steps, {len(references)} seeds"
    found: list[Figure] = []
    for variant, runs in by_variant.items():
        if variant != "fp32":
            gap_to_fp32 = Interval.of(gaps(final_losses(runs), references))
            values = f"{gap_to_fp32.mean * 100:+.2f}", f"± {gap_to_fp32.half_width * 100:.2f}"
            name = f"accuracy: {variant}, gap of the final loss to fp32, {trained} (%)"
            found.append(Figure(name, *values, f"<= {limit_of(variant) * 100:.2f}"))
    for before, after, _ in CONTRASTS:
        if before in by_variant and after in by_variant:
            difference = Interval.of(gaps(final_losses(by_variant[after]), final_losses(by_variant[before])))
            name = f"accuracy: {after} against {before}, difference of the final loss, {trained} (%)"
            found.append(Figure(name, f"{difference.mean * 100:+.3f}", f"± {difference.half_width * 100:.3f}", ""))
    return found


def _row(variant: str, runs: Sequence[Run], references: Sequence[float]) -> str:
    measured = [f"{statistics.median(run.bytes_per_parameter for run in runs):.2f}"]
    measured += [f"{statistics.median(run.step_time_s for run in runs):.3f}"]
    loss = f"{statistics.fmean(final_losses(runs)):.4f}"
    if variant == "fp32":
        return f"| fp32 | {loss} | | | | | {' | '.join(measured)} |"
    by_seed = gaps(final_losses(runs), references)
    interval, limit = Interval.of(by_seed), limit_of(variant)
    each = ", ".join(f"{100 * seed_gap:+.2f}" for seed_gap in by_seed)
    return f"| {variant} | {loss} | {interval} | {each} | {limit:.2%} | {interval.verdict(limit)} | {' | '.join(measured)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the report.

    Returns 0 if every gap is shown to be within its limit, 1 if one is not, 2 if the setting is not calm.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    for option, default in SETTING_OPTIONS.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--levels", default=",".join(LEVELS), help=f"allowed: {', '.join(VARIANTS)}; fp32 always runs")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the table and the plot")
    add_write_option(parser)
    parser.add_argument("--runs", type=Path, required=True, help="folder of finished runs; these are not repeated")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error(f"--seeds is {options.seeds}; allowed: 2 or more")
    unknown = sorted(set(options.levels.split(",")) - set(VARIANTS))
    if unknown:
        parser.error(f"--levels has {', '.join(unknown)}; allowed: {', '.join(VARIANTS)}")
    torch.set_num_threads(1)
    setting = small_llama(**{option: getattr(options, option) for option in SETTING_OPTIONS})
    options.runs.mkdir(parents=True, exist_ok=True)
    runs = Runs(options.runs, load_source_text(setting.sizes.max_sequence_length))
    settings = [replace(setting, seed=seed) for seed in range(options.seeds)]
    by_variant = {"fp32": [runs.get("fp32", each) for each in settings]}
    changed_start = [runs.get("fp32", replace(each, start_change=START_CHANGE)) for each in settings]
    complaint = why_not_calm(moved_by_chance(final_losses(changed_start), final_losses(by_variant["fp32"])), LIMIT)
    if complaint:
        sys.stderr.write(f"{complaint}\n")
        return 2
    others = [variant for variant in dict.fromkeys(options.levels.split(",")) if variant != "fp32"]
    for each in settings:  # seed by seed: whoever stops the run has whole seeds
        for variant in others:
            by_variant.setdefault(variant, []).append(runs.get(variant, each))
            sys.stderr.write(
                f"seed {each.seed}, {variant}: gap {gap(by_variant[variant][-1], by_variant['fp32'][each.seed]):+.2%}\n"
            )
    changed = [f" --{name.replace('_', '-')} {getattr(options, name)}" for name in SETTING_OPTIONS]
    command = f"python -m benchmarks.accuracy --seeds {options.seeds} --levels {','.join(by_variant)}{''.join(changed)}"
    report = table(by_variant, changed_start, setting, command)
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{datetime.now(UTC):%Y-%m-%d}-accuracy"
    (options.out / f"{name}.md").write_text(report + f"\n![curves]({name}.png)\n")
    draw([mean_curve(each) for each in by_variant.values()], options.out / f"{name}.png")
    sys.stdout.write(report)
    references = final_losses(by_variant["fp32"])
    if options.write:
        write(options.write, figures(by_variant, setting), command, is_timed=False)
    verdicts = {Interval.of(gaps(final_losses(by_variant[each]), references)).verdict(limit_of(each)) for each in others}
    return int(verdicts != {"inside"})


if __name__ == "__main__":
    raise SystemExit(main())

"""A comparison's report as tables of text: what the terminal, a Markdown file and an HTML page show alike."""

from collections.abc import Sequence
from typing import NamedTuple

from octet.api_schemas.comparison_report import ArmReport, ComparisonReport, Gap
from octet.client.text import duration, num_bytes, number


class Rows(NamedTuple):
    """A table: its title, its columns and its rows. All columns but the first hold numbers."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def arms(report: ComparisonReport) -> Rows:
    """Return a row for each arm: its gap to the baseline, and what it takes."""
    columns = ("ARM", "LOSS GAP", "95 %", "SEEDS", "ANSWER", "BYTES/PARAM", "SAVES", "TOKENS/S", "TIME")
    return Rows("Arms", columns, [_arm(arm) for arm in report.arms])


def _arm(arm: ArmReport) -> tuple[str, ...]:
    return (
        arm.name,
        number(arm.gap, "+.3%"),
        "–" if arm.half_width is None else f"± {arm.half_width:.3%}",
        str(len(arm.seeds)),
        arm.answer,
        number(arm.bytes_per_parameter, ".2f"),
        number(arm.memory_saving, ".0%"),
        number(arm.tokens_per_s, ",.0f"),
        duration(arm.train_time_s),
    )


def memory(report: ComparisonReport) -> Rows:
    """Return a row for each arm: the bytes that it holds, by class."""
    kinds = tuple(dict.fromkeys(kind for arm in report.arms for kind, count in arm.memory_bytes.items() if count))
    rows = []
    for arm in report.arms:
        held = [num_bytes(arm.memory_bytes.get(kind)) for kind in kinds]
        rows.append((arm.name, *held, num_bytes(arm.peak_memory_bytes)))
    return Rows("Bytes by class", ("ARM", *(kind.upper().replace("_", " ") for kind in kinds), "PEAK"), rows)


def gaps(report: ComparisonReport) -> Rows:
    """Return a row for each arm, measure and step at which it is compared with the baseline."""
    columns = ("ARM", "MEASURE", "STEP", "MEAN", "BASELINE", "GAP", "95 %", "SEEDS")
    rows = [_gap(arm, gap) for arm in report.arms if not arm.is_baseline for gap in arm.gaps]
    return Rows("Gaps at each evaluation", columns, rows)


def _gap(arm: ArmReport, gap: Gap) -> tuple[str, ...]:
    form = ".3%" if gap.is_relative else ".4f"
    half = "–" if gap.half_width is None else f"± {format(gap.half_width, form)}"
    means = f"{gap.mean:.4f}", f"{gap.baseline_mean:.4f}"
    return arm.name, gap.measure, str(gap.step), *means, format(gap.gap, f"+{form}"), half, str(gap.num_seeds)


def verdicts(report: ComparisonReport, left_out: Sequence[str]) -> list[str]:
    """Return the sentences: a verdict for each arm, the noise of the setting, and what was not compared."""
    lines = [f"{arm.words}." for arm in report.arms if not arm.is_baseline]
    if report.noise is not None:
        lines.append(f"Noise: a start changed by a thousandth moves {report.baseline}'s loss by {report.noise:.3%}.")
    if report.not_calm is not None:
        lines.append(f"Stopped: {report.not_calm}")
    return [*lines, *(f"Left out: {line}." for line in left_out)]


def as_markdown(title: str, report: ComparisonReport, left_out: Sequence[str]) -> str:
    """Write a report as Markdown."""
    parts = [f"# {title}", "\n".join(f"- {line}" for line in verdicts(report, left_out))]
    for each in (arms(report), memory(report), gaps(report)):
        ruler = ("---", *["---:"] * (len(each.columns) - 1))
        lines = [f"| {' | '.join(map(_cell, row))} |" for row in (each.columns, ruler, *each.rows)]
        parts.append("\n".join([f"## {each.title}", "", *lines]))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

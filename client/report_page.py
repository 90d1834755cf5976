"""A comparison's report as one HTML file that loads nothing: its tables, and curves with intervals as SVG.

The pictures are drawn here because a library that draws them puts 4.5 MB of scripts into each file (plotly 6).
"""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from octet.api_schemas.comparison_report import ArmReport, ComparisonReport
from octet.client.reports import Rows, arms, gaps, memory, verdicts

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe and Ito's colours, which the colour-blind can tell apart."""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 300, 78, 30, 12, 12
_NUM_TICKS = 5
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
figure { display: inline-block; margin: 0 1rem 1rem 0; }
svg { width: 40rem; max-width: 100%; } svg text { fill: currentColor; font-size: 12px; }
"""


class Curve(NamedTuple):
    """A line with an interval around each of its points, and the place of its colour."""

    name: str
    color: int
    points: Sequence[tuple[int, float, float]]
    """Steps, values and half widths."""


def as_page(title: str, report: ComparisonReport, left_out: Sequence[str]) -> str:
    """Write a report as an HTML document."""
    said = "".join(f"<li>{escape(line)}</li>" for line in verdicts(report, left_out))
    tables = "".join(map(_table, (arms(report), memory(report), gaps(report))))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><ul>{said}</ul>"
        f"{''.join(_figures(report))}{tables}</body></html>\n"
    )


def _table(rows: Rows) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in rows.columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows.rows)
    return f"<h2>{escape(rows.title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _figures(report: ComparisonReport) -> list[str]:
    """Draw each measure of evaluations twice: the means of all arms, and the gaps to the baseline."""
    measures = dict.fromkeys(gap.measure for arm in report.arms for gap in arm.gaps if gap.measure != "training_loss")
    figures = []
    for measure in measures:
        means = [Curve(arm.name, place, _means(arm, measure)) for place, arm in enumerate(report.arms)]
        others = [
            Curve(arm.name, place, _gap_points(arm, measure)) for place, arm in enumerate(report.arms) if not arm.is_baseline
        ]
        name = f"evaluation {measure}"
        figures.append(chart(f"{name} by step, mean over seeds with 95 %", means))
        figures.append(chart(f"{name}: gap to {report.baseline} by step, 95 %", others))
    return figures


def _means(arm: ArmReport, measure: str) -> list[tuple[int, float, float]]:
    return [(gap.step, gap.mean, gap.mean_half_width or 0.0) for gap in arm.gaps if gap.measure == measure]


def _gap_points(arm: ArmReport, measure: str) -> list[tuple[int, float, float]]:
    return [(gap.step, gap.gap, gap.half_width or 0.0) for gap in arm.gaps if gap.measure == measure]


def chart(title: str, curves: Sequence[Curve]) -> str:
    """Draw curves with bands, axes and a legend as an SVG figure; nothing if no curve has a point."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return ""
    first, last = min(step for step, _, _ in points), max(step for step, _, _ in points)
    low, high = min(value - half for _, value, half in points), max(value + half for _, value, half in points)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)

    def across(step: float) -> float:
        share = (step - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def down(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    drawn = []
    for place in range(_NUM_TICKS):
        value = low + (high - low) * place / (_NUM_TICKS - 1)
        drawn.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down(value):.1f}" y2="{down(value):.1f}" stroke="#8884"/>'
            f'<text x="{_LEFT - 6}" y="{down(value) + 4:.1f}" text-anchor="end">{value:.5g}</text>'
        )
    for step, anchor in {first: "start", last: "end"}.items():
        drawn.append(f'<text x="{across(step):.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{step}</text>')
    for curve in curves:
        color = _COLORS[curve.color % len(_COLORS)]
        above = [f"{across(step):.1f},{down(value + half):.1f}" for step, value, half in curve.points]
        below = [f"{across(step):.1f},{down(value - half):.1f}" for step, value, half in reversed(curve.points)]
        middle = [f"{across(step):.1f},{down(value):.1f}" for step, value, _ in curve.points]
        dots = "".join(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{color}"/>' for x, y in (each.split(",") for each in middle))
        drawn.append(f'<polygon points="{" ".join(above + below)}" fill="{color}" fill-opacity="0.18"/>')
        drawn.append(f'<polyline points="{" ".join(middle)}" fill="none" stroke="{color}" stroke-width="1.5"/>{dots}')
    legend = " ".join(
        f'<span style="color:{_COLORS[curve.color % len(_COLORS)]}">&#9632; {escape(curve.name)}</span>' for curve in curves
    )
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(drawn)}</svg>'
    return f"<figure><figcaption>{escape(title)}<br>{legend}</figcaption>{picture}</figure>"

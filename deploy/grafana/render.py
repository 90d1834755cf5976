"""Draws a board from what Prometheus has, so that a reader sees it without Grafana. matplotlib, one PNG for each board.

Panels that need a GPU are left out: a picture shows what its run measured, and nothing else.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from deploy.grafana.model import STATE_COLORS, Board, Panel, Query
from octet.api_schemas.levels import LEVELS

Series = list[dict[str, Any]]
Ask = Callable[[str], Series]
"""Answers an expression with the matrix of the time that is drawn."""

_COLUMNS = 24
_INCHES_PER_COLUMN, _INCHES_PER_ROW = 0.72, 0.36
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SUFFIXES = {
    "bytes": "B", "Bps": "B/s", "s": "s", "flops": "FLOP/s", "watt": "W", "hertz": "Hz", "celsius": "°C",
    "dB": "dB", "reqps": "/s", "ops": "/s",
}  # fmt: skip
_LEVEL_COLORS = {
    "fp32": "#79706e", "fp16-amp": "#bab0ac", "bf16-amp": "#9d9d9d", "te": "#b279a2", "ao": "#72b7b2", "O1": "#54a24b",
    "O2": "#4c78a8", "O2-8bit": "#f58518", "O3": "#e45756", "O3-split": "#ff9da6", "O3-split-8bit": "#eeca3b",
}  # fmt: skip
_BAR = "#4c78a8"
_MATPLOTLIB = {
    "yellow": "#f2cc0c", "light-blue": "#8ab8ff", "blue": "#3274d9", "light-orange": "#ffb357", "orange": "#ff780a",
    "light-purple": "#ca95e5", "green": "#56a64b", "red": "#e02f44", "purple": "#a352cc",
}  # fmt: skip
"""Grafana's names of colours."""


def draw(board: Board, ask: Ask, path: Path, start: float) -> None:
    """`ask` is given each query of the board; `start` is the unix time that the axes begin at."""
    places, num_rows = _layout(board)
    figure = pyplot.figure(figsize=(_COLUMNS * _INCHES_PER_COLUMN, num_rows * _INCHES_PER_ROW), dpi=80)
    grid = figure.add_gridspec(num_rows, _COLUMNS, left=0.02, right=0.985, top=1, bottom=0)
    lines = [(annotation.color, ask(annotation.expr)) for annotation in board.annotations]
    for title, row in places["rows"]:
        _header(figure, title, 1 - row / num_rows - 0.6 / num_rows, is_board=row == 0)
    for panel, row, column in places["panels"]:
        height = _height(panel)
        axes = figure.add_subplot(grid[row + 1 : row + height, column : column + panel.width])
        axes.set_position(_inset(axes, num_rows))
        axes.set_title(panel.title, fontsize=9, loc="left", fontweight="bold")
        _DRAWN.get(panel.kind, _draw_lines)(axes, panel, ask, start)
        if panel.kind in {"lines", "stacked"} and axes.lines + list(axes.collections):
            for color, series in lines:
                for moment in {at for one in series for at, _ in one["values"]}:
                    axes.axvline(moment - start, color=color, linewidth=0.5, alpha=0.4)
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)


def _layout(board: Board) -> tuple[dict[str, list[Any]], int]:
    """Panels flow left to right and wrap, as in Grafana."""
    places: dict[str, list[Any]] = {"rows": [(board.title, 0)], "panels": []}
    row = 2
    for group in board.rows:
        panels = [panel for panel in group.panels if panel.needs == "nothing"]
        if not panels:
            continue
        places["rows"].append((group.title, row))
        row, column, height = row + 1, 0, 0
        for panel in panels:
            if column + panel.width > _COLUMNS:
                row, column, height = row + height, 0, 0
            places["panels"].append((panel, row, column))
            column, height = column + panel.width, max(height, _height(panel))
        row += height
    return places, row


def _height(panel: Panel) -> int:
    return 4 if panel.kind == "stat" else 8


def _header(figure: Figure, title: str, y: float, *, is_board: bool) -> None:
    figure.text(0.012, y, title, fontsize=15 if is_board else 11, fontweight="bold", color="#1f3b57", va="center")


def _inset(axes: Axes, num_rows: int) -> list[float]:
    """Room for tick labels left and below."""
    box = axes.get_position()
    return [box.x0 + 0.026, box.y0 + 0.9 / num_rows, box.width - 0.034, box.height - 1.4 / num_rows]


def _draw_lines(axes: Axes, panel: Panel, ask: Ask, start: float) -> None:
    found = [(name, series["values"]) for name, series in _series(panel, ask)]
    curves = [(name, [at - start for at, _ in values], [float(value) for _, value in values]) for name, values in found]
    if panel.kind == "stacked" and curves:
        moments = sorted({moment for _, times, _ in curves for moment in times})
        heights = [_aligned(times, values, moments) for _, times, values in curves]
        names = [name for name, _, _ in curves]
        colors = [_MATPLOTLIB[STATE_COLORS[name]] for name in names] if set(names) <= set(STATE_COLORS) else None
        axes.stackplot(moments, heights, labels=names, alpha=0.75, colors=colors)
    for name, times, values in curves if panel.kind != "stacked" else ():
        marker = "." if len(times) < 40 else None
        axes.plot(times, values, marker=marker, linewidth=1.2, markersize=3, label=name, color=_color_of_level(name))
    if panel.log:
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value, panel.unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    if panel.from_zero and not panel.log and curves:
        top = axes.get_ylim()[1]
        axes.set_ylim(-0.03 * top, top)  # a curve that lies at zero is seen
    if curves:
        axes.legend(fontsize=6, ncols=2, loc="best", framealpha=0.6)
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", fontsize=9, color="grey")


def _draw_xy(axes: Axes, panel: Panel, ask: Ask, _start: float) -> None:
    for name, (steps, values) in sorted(curves(panel, ask).items()):
        axes.plot(steps, values, ".", markersize=4, label=name, color=_color_of_level(name))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value, panel.unit)))
    axes.set_xlabel(panel.queries[0].legend, fontsize=7, labelpad=1)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=6, ncols=2, loc="best", framealpha=0.6)


def _draw_by_step(axes: Axes, panel: Panel, ask: Ask, _start: float) -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    for query in panel.queries:
        for series in ask(query.expr):
            if (value := _last(series)) is not None:
                found.setdefault(series["metric"]["curve"], []).append((float(series["metric"]["step"]), value))
    for name, points in sorted(found.items()):
        steps, values = zip(*sorted(points), strict=True)
        is_band = name not in LEVELS
        style, color = ("--", "#999999") if is_band else (".-", _color_of_level(name))
        axes.plot(steps, values, style, markersize=5, linewidth=1.2, label=name, color=color, zorder=1 if is_band else 2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value, panel.unit)))
    axes.set_xlabel("step", fontsize=7, labelpad=1)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=6, ncols=2, loc="best", framealpha=0.6)


def curves(panel: Panel, ask: Ask) -> dict[str, tuple[list[float], list[float]]]:
    """x and y of an `xy` panel by the name of the curve: where series of the same labels have values at the same moment."""
    x_query, y_query = panel.queries
    x_of = {
        (tuple(sorted(series["metric"].items())), at): float(value)
        for series in ask(x_query.expr)
        for at, value in series["values"]
    }
    found: dict[str, tuple[list[float], list[float]]] = {}
    for series in ask(y_query.expr):
        labels = tuple(sorted(series["metric"].items()))
        steps, values = found.setdefault(_name(y_query, series["metric"]), ([], []))
        for at, value in series["values"]:
            if (labels, at) in x_of:
                steps.append(x_of[labels, at])
                values.append(float(value))
    return found


def _draw_stat(axes: Axes, panel: Panel, ask: Ask, _start: float) -> None:
    axes.set_axis_off()
    found = _series(panel, ask)
    now = max((series["values"][-1][0] for _, series in found), default=0.0)
    values = [(name, _last(series)) for name, series in found if series["values"][-1][0] == now]
    shown = [(name, value) for name, value in values if value is not None]
    if panel.names:
        texts = [name for name, _ in shown]
    elif len(shown) == 1:
        texts = [human(shown[0][1], panel.unit)]
    else:
        texts = [f"{name} {human(value, panel.unit)}" for name, value in shown]
    size = 17 if len(texts) == 1 and len(texts[0]) < 12 else 9
    axes.text(0.02, 0.5, "\n".join(texts) or "no data", fontsize=size, va="center", color="#2f6f4f")


def _draw_bars(axes: Axes, panel: Panel, ask: Ask, _start: float) -> None:
    values = [(name, _last(series)) for name, series in _series(panel, ask)]
    shown = [(name, value) for name, value in values if value is not None]
    shown.sort(key=lambda bar: (bar[0].partition(" ")[2], ["", *LEVELS].index(_level_in(bar[0]))))
    colors = [_color_of_level(name) or _BAR for name, _ in shown]
    bars = axes.barh([name for name, _ in shown], [value for _, value in shown], color=colors)
    axes.bar_label(bars, labels=[f" {human(value, panel.unit)}" for _, value in shown], fontsize=7)
    axes.margins(x=0.15 if panel.width >= 12 else 0.35)  # room for the labels
    box = axes.get_position()
    axes.set_position([box.x0 + 0.035, box.y0, box.width - 0.06, box.height])
    axes.tick_params(labelsize=7, labelbottom=False, bottom=False)
    axes.invert_yaxis()


def _level_in(name: str) -> str:
    """The level that a name begins with; empty where it begins with none."""
    first = name.partition(" ")[0]
    return first if first in LEVELS else ""


def _color_of_level(name: str) -> str | None:
    """One colour for a level in every panel; None for a name that begins with no level."""
    return _LEVEL_COLORS.get(_level_in(name))


def _draw_table(axes: Axes, panel: Panel, ask: Ask, _start: float) -> None:
    """Draw the rows of the last moment that has any: the table of a run that is over would be empty."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    names: list[str] = []
    answers = [(query, ask(query.expr)) for query in panel.queries]
    now = max((series["values"][-1][0] for _, found in answers for series in found), default=0.0)
    for query, found in answers:
        for series in found:
            if series["values"][-1][0] < now:
                continue
            names = sorted(set(series["metric"]) - set(panel.hidden))
            value = _last(series)
            if value is not None:
                rows.setdefault(tuple(series["metric"][name] for name in names), {})[query.legend] = human(value, panel.unit)
    axes.set_axis_off()
    if rows:
        columns = [query.legend for query in panel.queries]
        cells = [[*labels, *(values.get(column, "") for column in columns)] for labels, values in rows.items()]
        table = axes.table(cells, colLabels=[*names, *columns], loc="upper left", cellLoc="left")
        table.auto_set_font_size(False)
        table.set_fontsize(7)
        table.auto_set_column_width(range(len(names) + len(columns)))


def _series(panel: Panel, ask: Ask) -> list[tuple[str, dict[str, Any]]]:
    return [(_name(query, series["metric"]), series) for query in panel.queries for series in ask(query.expr)]


def _name(query: Query, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), query.legend)


def _last(series: dict[str, Any]) -> float | None:
    values = [float(value) for _, value in series["values"]]
    return next((value for value in reversed(values) if not math.isnan(value)), None)


def _aligned(times: list[float], values: list[float], moments: list[float]) -> list[float]:
    known = {time: 0.0 if math.isnan(value) else value for time, value in zip(times, values, strict=True)}
    return [known.get(moment, 0.0) for moment in moments]


def human(value: float, unit: str) -> str:
    """A number as the unit is read."""
    if unit == "percentunit":
        # The addition makes 0 of -0.
        return f"{round(value * 100, 6) + 0.0:.3g} %"
    if unit == "mbytes":
        return human(value * 2**20, "bytes")
    if unit == "sci":
        return f"{value:.2e}"
    suffix = f" {_SUFFIXES[unit]}" if unit in _SUFFIXES else ""
    if unit == "s" and 0 < abs(value) < 0.1:
        return f"{value * 1e3:.3g} ms"
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor and unit != "s":
            return f"{value / factor:.3g} {prefix}{suffix.strip()}".rstrip()
    return f"{value:.4g}{suffix}"


_DRAWN = {"stat": _draw_stat, "bars": _draw_bars, "table": _draw_table, "xy": _draw_xy, "by_step": _draw_by_step}

"""Describe dashboards as plain data (boards, rows, panels, queries) and turn them into Grafana's JSON.

The same data is drawn by `render` and executed against a live Prometheus by the tests, so nothing is stated twice. A panel
cannot be written without a unit, a description and a query.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries, xychart
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import xychart as xychart_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

TAG = "octet"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
GrafanaPanel = timeseries.Panel | stat.Panel | bargauge.Panel | table.Panel | xychart.Panel
Kind = Literal["lines", "stacked", "points", "stat", "bars", "table", "xy", "by_step"]

STATE_COLORS = {
    "queued": "yellow",
    "starting": "light-blue",
    "running": "blue",
    "pausing": "light-orange",
    "paused": "orange",
    "cancelling": "light-purple",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "purple",
}
"""One colour for each state of a job and outcome of an attempt, on every board; the terminal has the same hues."""


@dataclass(frozen=True)
class Query:
    """PromQL and how its series are called; `{{label}}` stands for a label's value."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel. `unit` is Grafana's id of it; `log` draws the axis in powers of ten.

    An `xy` panel draws its second query over its first, a point for each moment at which both have a value; the second one's
    legend is the label that tells its curves apart. A `by_step` panel draws the present values of all its queries over their
    label `step`; the label `curve` tells its curves apart. `names`: a stat shows the legend, not the value. `hidden`: labels
    that a table needs for its links and does not show. `from_zero`: the axis begins at 0; without, it fits the values. Losses
    fit, because their differences are small beside them, and differences do, which may be negative.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    width: int = 8
    log: bool = False
    names: bool = False
    hidden: tuple[str, ...] = ()
    from_zero: bool = True
    needs: Literal["nothing", "gpu", "dcgm", "experts", "tasks"] = "nothing"


class Drawn(TypedDict, total=False):
    """The options of a panel, as `Panel` describes them."""

    width: int
    log: bool
    names: bool
    hidden: tuple[str, ...]
    from_zero: bool
    needs: Literal["nothing", "gpu", "dcgm", "experts", "tasks"]


def panel(title: str, description: str, unit: str, *queries: Query, kind: Kind = "lines", **drawn: Unpack[Drawn]) -> Panel:
    """Describe a panel of one or several queries."""
    return Panel(title, description, unit, queries, kind, **drawn)


def stat_panel(title: str, description: str, unit: str, *queries: Query, **drawn: Unpack[Drawn]) -> Panel:
    """Describe a panel that shows the present values as large numbers."""
    return Panel(title, description, unit, queries, "stat", **drawn)


@dataclass(frozen=True)
class Row:
    """Panels below a title. A collapsed row loads its panels once it is opened."""

    title: str
    panels: tuple[Panel, ...]
    is_collapsed: bool = False


def row(title: str, *panels: Panel, is_collapsed: bool = False) -> Row:
    """Describe a row of panels."""
    return Row(title, panels, is_collapsed)


@dataclass(frozen=True)
class Variable:
    """A choice at the top of the board. `multi`: several, or all, to be matched with =~.

    `regex` takes the value, and the text that is shown for it, out of each line of `query_result`.
    """

    name: str
    label: str
    query: str
    multi: bool = False
    regex: str = ""


@dataclass(frozen=True)
class Annotation:
    """A vertical line wherever the expression has a value."""

    name: str
    expr: str
    color: str


@dataclass(frozen=True)
class Board:
    """One dashboard. The uid is part of addresses that people keep: never change it."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()
    annotations: tuple[Annotation, ...] = ()
    range: str = "now-1h"

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


def to_grafana(board: Board) -> models.Dashboard:
    """The board in Grafana's own types."""
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .time(board.range, "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Octet").type(models.DashboardLinkType.DASHBOARDS).tags([TAG]).keep_time(True).icon("apps")
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in board.variables:
        builder.with_variable(_variable(variable))
    for annotation in board.annotations:
        query = dashboard.AnnotationQuery().name(annotation.name).datasource(SOURCE).enable(True)
        builder.annotation(query.expr(annotation.expr).icon_color(annotation.color))
    number = 0
    for row in board.rows:
        heading = dashboard.Row(row.title)
        panels = [_panel(panel, number + place) for place, panel in enumerate(row.panels, 1)]
        number += len(panels)
        if row.is_collapsed:
            for panel in panels:
                heading.with_panel(panel)
        builder.with_row(heading)
        if not row.is_collapsed:
            for panel in panels:
                builder.with_panel(panel)
    return builder.build()


def _variable(variable: Variable) -> dashboard.QueryVariable:
    builder = (
        dashboard.QueryVariable(variable.name)
        .label(variable.label)
        .query(variable.query)
        .datasource(SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_DESC)
        .multi(variable.multi)
        .include_all(variable.multi)
        .regex(variable.regex)
    )
    return builder.all_value(".*") if variable.multi else builder


def _panel(panel: Panel, number: int) -> GrafanaPanel:
    builder = _BUILDERS[panel.kind](panel)
    builder.id(number).title(panel.title).description(panel.description).unit(panel.unit).datasource(SOURCE)
    builder.height(4 if panel.kind == "stat" else 8).span(panel.width).links([])
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + index))
        target.datasource(SOURCE)
        if panel.kind in {"table", "by_step"}:
            target.instant().format(PromQueryFormat.TABLE)
        elif panel.kind == "xy":
            target.range().format(PromQueryFormat.TABLE)
        elif panel.kind in {"stat", "bars"}:
            target.instant()
        else:
            target.range()
        builder.with_target(target)
    for state, color in STATE_COLORS.items() if _tells_states_apart(panel) else ():
        builder.override_by_name(state, [models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})])
    return builder


def _tells_states_apart(panel: Panel) -> bool:
    return any(query.legend in {"{{state}}", "{{outcome}}"} and "octet_layers" not in query.expr for query in panel.queries)


def _lines(panel: Panel) -> timeseries.Panel:
    builder = timeseries.Panel().line_width(1.5).fill_opacity(0).show_points(common_models.VisibilityMode.AUTO)
    if panel.kind == "stacked":
        builder.fill_opacity(60).stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if panel.kind == "points":
        builder.draw_style(common_models.GraphDrawStyle.POINTS).point_size(6)
    if panel.log:
        builder.scale_distribution(common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10))
    elif panel.from_zero:
        builder.min(0)
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST).show_legend(True)
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    legend.calcs(["lastNotNull"])
    return builder.legend(legend.placement(common_models.LegendPlacement.BOTTOM)).tooltip(tooltip)


def _stat(panel: Panel) -> stat.Panel:
    shown = common_models.BigValueTextMode.NAME if panel.names else common_models.BigValueTextMode.AUTO
    return stat.Panel().graph_mode(common_models.BigValueGraphMode.NONE).reduce_options(_last()).text_mode(shown)


def _bars(panel: Panel) -> bargauge.Panel:
    builder = bargauge.Panel().orientation(common_models.VizOrientation.HORIZONTAL).reduce_options(_last())
    return builder.min(0) if panel.from_zero else builder


def _table(panel: Panel) -> table.Panel:
    """One row for each set of labels, one column for each query, under the query's legend."""
    names = {f"Value #{chr(ord('A') + index)}": query.legend for index, query in enumerate(panel.queries)}
    organize = {"excludeByName": {"Time": True}, "renameByName": names | {"Value": panel.queries[0].legend}}
    builder = (
        table.Panel()
        .with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(models.DataTransformerConfig(id_val="organize", options=organize))
    )
    for label in panel.hidden:
        builder.override_by_name(label, [models.DynamicConfigValue("custom.hidden", True)])
    if "job_id" not in panel.hidden:
        return builder
    to_job = dashboard.DashboardLink("Open the job").url("/d/octet-job?var-job_id=${__data.fields.job_id}&${__url_time_range}")
    return builder.data_links([to_job])


def _xy(panel: Panel) -> xychart.Panel:
    """Rows of time, labels and both values, then a frame for each curve: its first number is x and its second y."""
    x, y = panel.queries
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST).show_legend(True)
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.SINGLE)
    partition = {"fields": [y.legend.strip("{}")], "keepFields": False}
    return (
        xychart.Panel()
        .mapping(xychart_models.SeriesMapping.AUTO)
        .show(xychart_models.XYShowMode.POINTS)
        .point_size(xychart.XychartFieldConfigPointSize().fixed(4))
        .with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(models.DataTransformerConfig(id_val="partitionByValues", options=partition))
        .override_by_name("Value #A", [models.DynamicConfigValue("displayName", x.legend)])
        .override_by_name("Value #B", [models.DynamicConfigValue("custom.axisLabel", panel.title)])
        .legend(legend.placement(common_models.LegendPlacement.BOTTOM))
        .tooltip(tooltip)
    )


def _by_step(panel: Panel) -> xychart.Panel:
    """Rows of labels and a value, then a frame for each curve, in the order of its steps."""
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST).show_legend(True)
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.SINGLE)
    to_number = {"conversions": [{"targetField": "step", "destinationType": "number"}], "fields": {}}
    order = {"excludeByName": {"Time": True}, "indexByName": {"curve": 0, "step": 1, "Value": 2}, "renameByName": {}}
    steps = [
        ("merge", {}),
        ("convertFieldType", to_number),
        ("sortBy", {"fields": {}, "sort": [{"field": "step"}]}),
        ("organize", order),
        ("partitionByValues", {"fields": ["curve"], "keepFields": False}),
    ]
    builder = xychart.Panel().mapping(xychart_models.SeriesMapping.AUTO).show(xychart_models.XYShowMode.POINTS_AND_LINES)
    for name, options in steps:
        builder.with_transformation(models.DataTransformerConfig(id_val=name, options=options))
    return (
        builder.point_size(xychart.XychartFieldConfigPointSize().fixed(5))
        .override_by_name("Value", [models.DynamicConfigValue("custom.axisLabel", panel.title)])
        .legend(legend.placement(common_models.LegendPlacement.BOTTOM))
        .tooltip(tooltip)
    )


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


_BUILDERS: dict[Kind, Callable[[Panel], GrafanaPanel]] = {
    "lines": _lines,
    "stacked": _lines,
    "points": _lines,
    "stat": _stat,
    "bars": _bars,
    "table": _table,
    "xy": _xy,
    "by_step": _by_step,
}

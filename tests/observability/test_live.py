"""Every expression of every panel, annotation and rule is executed by a real Prometheus that watched real jobs."""

import math
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deploy.grafana.generate import BOARDS
from deploy.grafana.model import Board
from octet.worker.metrics.exporter import DROPPED, MAX_SERIES
from octet.worker.metrics.table import FAMILIES
from tests.observability.live import DCGM, ROOT, Live, Run

pytestmark = pytest.mark.system
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/prometheus/rules/octet.yml").read_text())["groups"]
    for rule in group["rules"]
]
EXPERTS_ONLY = {"octet_expert_load_ratio"}
GPU_ONLY = {"octet_train_flops_utilization_ratio"} | {family.name for family in FAMILIES if "_gpu_" in family.name}
FROM_PROMETHEUS = {"up", "scrape_duration_seconds"}
UNUSED_ON_PURPOSE = {
    "octet_job_info": "joins",
    "process_virtual_memory_bytes": "prometheus-client's own",
    "process_start_time_seconds": "prometheus-client's own",
    "octet_http_request_duration_seconds_sum": "part of a histogram",
    "octet_job_queue_wait_seconds_sum": "part of a histogram",
    "octet_job_queue_wait_seconds_count": "part of a histogram",
    "octet_event_loop_lag_seconds_sum": "part of a histogram",
    "octet_event_loop_lag_seconds_count": "part of a histogram",
    "octet_database_transaction_duration_seconds_sum": "part of a histogram",
}


def panel_queries() -> Iterator[Any]:
    for board in BOARDS:
        for panel in board.panels:
            for number, query in enumerate(panel.queries):
                yield pytest.param(query.expr, panel.needs, id=f"{board.uid}-{panel.title}-{number}")


def test_the_jobs_went_as_they_should(live: Live) -> None:
    states = {name: live.server.client.job(job_id).state.value for name, job_id in live.jobs.items()}
    assert states.pop("fails") == "failed"
    assert set(states) == {"O2", "bf16-amp", "seed 0", "seed 1", "demotes"}
    assert set(states.values()) == {"succeeded"}


NOT_LIVE = {
    "experts": "a job with a mixture of experts among the live ones; tests/worker/fp8/test_experts.py has the metric",
    "tasks": "a job with an evaluation among the live ones; tests/e2e/test_evaluation.py has its scores",
}


@pytest.mark.parametrize(("expr", "needs"), [*panel_queries()])
def test_a_panel_has_data(live: Live, expr: str, needs: str) -> None:
    if needs in NOT_LIVE:
        pytest.skip(f"missing: {NOT_LIVE[needs]}")
    job_id = "gpu" if needs == "gpu" else live.jobs["O2"]
    assert has_data(live, live.filled_in(expr, job_id))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_variables_and_annotations_have_values(live: Live, board: Board) -> None:
    for variable in board.variables:
        query = live.filled_in(variable.query, "")
        if values := re.fullmatch(r"label_values\((.+), (\w+)\)", query):
            query = f"count by ({values[2]}) ({values[1]})"
        assert has_data(live, query.removeprefix("query_result")), variable
    for annotation in board.annotations:
        job = {"Failure": "fails", "Layer demoted": "demotes"}.get(annotation.name, "O2")
        assert has_data(live, live.filled_in(annotation.expr, live.jobs[job])), annotation


@pytest.mark.parametrize("rule", [rule for rule in RULES if "record" in rule], ids=lambda rule: rule["record"])
def test_a_recording_rule_has_data(live: Live, rule: dict[str, Any]) -> None:
    assert has_data(live, rule["record"])


@pytest.mark.parametrize("rule", [rule for rule in RULES if "alert" in rule], ids=lambda rule: rule["alert"])
def test_an_alert_is_over_series_that_exist_and_is_quiet_here(live: Live, rule: dict[str, Any]) -> None:
    for name in metrics_in(rule["expr"]):
        assert has_data(live, name), name
    assert live.prometheus.instant(f'ALERTS{{alertname="{rule["alert"]}", alertstate="firing"}}') == []


def test_panels_and_rules_name_exactly_the_exposed_metrics(live: Live) -> None:
    """Both ways: a panel or rule shows only exposed metrics, and every exposed metric is shown."""
    exposed = {line.partition("{")[0].split()[0] for text in live.exposed.values() for line in samples(text)}
    known = exposed | {family.name for family in FAMILIES} | {DROPPED} | FROM_PROMETHEUS | set(DCGM)
    known |= {rule["record"] for rule in RULES if "record" in rule}
    expressions = [rule["expr"] for rule in RULES]
    for board in BOARDS:
        expressions += [query.expr for panel in board.panels for query in panel.queries]
        expressions += [annotation.expr for annotation in board.annotations]
        expressions += [variable.query for variable in board.variables]
    named = {name for expr in expressions for name in metrics_in(expr)}
    assert named - known == set(), "named in a panel or rule, and nothing exposes it"
    unused = known - named - set(UNUSED_ON_PURPOSE) - FROM_PROMETHEUS
    unused = {name for name in unused if not name.endswith("_created")}  # prometheus-client adds one to every counter
    assert unused == set(), "exposed, and no panel or rule shows it"


def test_a_rank_on_a_cpu_exposes_all_its_metrics(live: Live) -> None:
    told = {line.partition("{")[0].split()[0] for line in samples(live.exposed["rank"])}
    assert told == {family.name for family in FAMILIES} - GPU_ONLY - EXPERTS_ONLY | {DROPPED}
    assert len(list(samples(live.exposed["rank"]))) <= MAX_SERIES


def test_discovery_labels_every_rank(live: Live) -> None:
    found = live.prometheus.instant(f'last_over_time(octet_train_step{{job_id="{live.jobs["O2"]}"}}[10m])')
    labels = [series["metric"] for series in found]
    assert {entry["rank"] for entry in labels} == {"0", "1"}
    for entry in labels:
        assert entry["job"] == "octet-rank"
        assert (entry["pool"], entry["level"], entry["tenant"]) == ("cpu", "O2", "default")
        assert entry["attempt"].startswith("att_")


def test_losses_overlay_by_step_though_the_jobs_ran_at_different_times(live: Live) -> None:
    from deploy.grafana.render import curves  # loads matplotlib

    (panel,) = [panel for board in BOARDS for panel in board.panels if panel.kind == "xy"]

    def ask(expr: str) -> list[dict[str, Any]]:
        return live.prometheus.range(live.filled_in(expr, ""), live.start, live.end)

    moments = {series["metric"]["job_id"]: {at for at, _ in series["values"]} for series in ask('octet_train_step{rank="0"}')}
    assert not moments[live.jobs["O2"]] & moments[live.jobs["bf16-amp"]], "the first job takes all slots"
    found = curves(panel, ask)
    assert {"O2", "bf16-amp"} <= set(found)
    for level, num_steps in (("O2", Run.steps), ("bf16-amp", Run.other_steps)):
        steps, losses = found[level]
        assert min(steps) < num_steps // 2
        assert max(steps) == num_steps
        assert losses[steps.index(max(steps))] < losses[steps.index(min(steps))]


def test_the_difference_to_the_yardstick_is_that_of_the_evaluations(live: Live) -> None:
    """Levels draws evaluations that met after the same step, whenever each job ran."""
    (panel,) = [panel for board in BOARDS for panel in board.panels if panel.kind == "by_step"]
    found = live.prometheus.instant(live.filled_in(panel.queries[0].expr, ""))
    shown = {(entry["metric"]["curve"], int(entry["metric"]["step"])): float(entry["value"][1]) for entry in found}
    evaluated = {
        name: {point.step: point.evaluation_loss for point in live.server.client.metrics(live.jobs[name])}
        for name in ("O2", "seed 0", "seed 1")
    }
    of_o2, *seeds = [losses[Run.steps] for losses in evaluated.values()]
    assert None not in (of_o2, *seeds)
    mean = sum(seeds) / len(seeds)
    at_the_end = {curve: difference for (curve, step), difference in shown.items() if step == Run.steps}
    assert at_the_end == pytest.approx(
        {
            "O2": of_o2 / mean - 1,
            "bf16-amp": 0,
            "yardstick, highest of its seeds": max(seeds) / mean - 1,
            "yardstick, lowest of its seeds": min(seeds) / mean - 1,
        },
        abs=1e-6,
    )


def test_series_of_an_ended_job_are_gone(live: Live) -> None:
    live.prometheus.wait_for(f'absent(octet_train_step{{job_id="{live.jobs["O2"]}"}})')
    live.prometheus.wait_for('absent(up{job="octet-rank"})')


@pytest.mark.parametrize("exporter", ["rank", "api", "api at the end"])
def test_promtool_accepts_the_metrics(live: Live, promtool: str, exporter: str) -> None:
    answer = subprocess.run([promtool, "check", "metrics"], input=live.exposed[exporter], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""


def samples(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line and not line.startswith("#"))


def has_data(live: Live, expr: str) -> bool:
    """Return True if the expression has a number at some moment of the run."""
    found = live.prometheus.range(expr, live.start, live.end + 2)
    values = [float(value) for series in found for _, value in series["values"]]
    return any(not math.isnan(value) for value in values)


def metrics_in(expr: str) -> set[str]:
    """Return the names of metrics: words that are no function, keyword or label, outside quotes, braces and grouping."""
    bare = re.sub(r'"[^"]*"', "", expr)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", bare)
    bare = re.sub(r"\b(by|on|group_left|without|ignoring)\s*\([^)]*\)", " ", bare)
    bare = bare.replace("query_result", " ")
    bare = re.sub(r"label_values\((.+), \w+\)", r"\1", bare)
    return {
        word for word in re.findall(r"[A-Za-z_][\w:]*", bare) if re.match(r"octet_|process_|DCGM_|up$|scrape_|\w+:octet", word)
    }

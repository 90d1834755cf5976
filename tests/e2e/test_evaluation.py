"""A job whose exports are evaluated: its scores are where those of other evaluations are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from octet.api_schemas import JobState
from tests.e2e.conftest import served
from tests.e2e.octet_server import Server
from tests.kit.tasks import write_tasks

pytestmark = pytest.mark.system


class TrustingServer(Server):
    """A server whose pool runs code of users."""

    def command(self) -> list[str]:
        return [*super().command(), "--pools", str(self.data_dir.with_name("pools.yaml"))]


@pytest.fixture
def trusting_server(tmp_path: Path) -> Iterator[Server]:
    pool = {"name": "cpu", "node_label": ["octet-pool", "cpu"], "slots": 2, "allows_entrypoints": True}
    (tmp_path / "pools.yaml").write_text(yaml.safe_dump([pool]))
    yield from served(TrustingServer(tmp_path / "octet"))


@pytest.fixture
def evaluated(spec_document: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A job of four steps that evaluates two exports."""
    return spec_document | {
        "training": spec_document["training"] | {"steps": 4, "eval_every": 2, "checkpoint_every": 2},
        "export": {"format": "bf16", "when": "every_checkpoint", "compared_tokens": 0},
        "evaluation": {"path": str(write_tasks(tmp_path / "tasks")), "tasks": ["capitals"], "every": 2},
    }


def test_scores_are_shown_where_metrics_are(trusting_server: Server, evaluated: dict[str, Any]) -> None:
    server = trusting_server
    job = server.finish(server.client.submit(evaluated).id)
    assert (job.state, job.message) == (JobState.SUCCEEDED, None)
    assert job.summary is not None
    metrics = job.summary.evaluation_metrics
    assert metrics["capitals_acc_half_width"] > 0
    scores = {f"capitals_{name}{end}" for name in ("acc", "acc_norm") for end in ("", "_half_width")}
    assert set(metrics) == {"token_accuracy", *scores}
    curve = server.client.curve(job.id)
    assert curve.evaluations.step == (2, 4)
    assert curve.evaluations.metrics["capitals_acc"][-1] == pytest.approx(metrics["capitals_acc"], abs=1e-5)
    assert None not in (*curve.evaluations.loss, *curve.evaluations.metrics["token_accuracy"])
    said = [event.message for event in server.client.events(job.id) if event.type == "job.evaluated"]
    assert [message.partition(":")[0] for message in said] == ["scores of step 2", "scores of step 4"]
    shown = httpx.get(f"http://127.0.0.1:{server.port}/metrics").text
    [line] = [line for line in shown.splitlines() if job.id in line and 'metric="capitals_acc"' in line]
    assert float(line.rpartition(" ")[2]) == pytest.approx(metrics["capitals_acc"])


def test_a_comparison_has_the_gaps_of_scores(trusting_server: Server, evaluated: dict[str, Any]) -> None:
    server = trusting_server
    asked = {"job": evaluated, "levels": ["fp32", "O2"], "seeds": 2, "tolerance": 0.05}
    comparison_id = server.client.compare(asked).id
    server.wait_for(lambda: server.client.comparison(comparison_id).state.is_terminal)
    comparison = server.client.comparison(comparison_id)
    [arm] = [arm for arm in comparison.report.arms if arm.name.endswith("O2")]
    summaries = [server.client.job(child.job_id).summary for child in comparison.children if child.arm == arm.name]
    scores = [summary.evaluation_metrics["capitals_acc"] for summary in summaries if summary is not None]
    [gap] = [gap for gap in arm.gaps if (gap.measure, gap.step) == ("capitals_acc", 4)]
    assert (gap.num_seeds, gap.mean) == (2, pytest.approx(sum(scores) / 2, abs=1e-5))
    assert not gap.is_relative
    assert {"loss", "capitals_acc_norm"} <= {gap.measure for gap in arm.gaps}

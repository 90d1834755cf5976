"""`octet compare`: a job file in arms, a comparison that is there, and jobs that are over, as text, JSON, Markdown and HTML."""

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from octet.api_schemas import EvaluationReport
from octet.api_schemas.comparison import Comparison, ComparisonSpec
from octet.api_schemas.comparison_report import ComparisonReport
from octet.client import Client
from octet.client.cli import build_app
from octet.client.report_page import Curve, chart
from octet.service import store
from tests.client.octet_app import OctetApp
from tests.kit.summaries import summary_of

Octet = Callable[..., Result]


@pytest.fixture
def octet(app: OctetApp) -> Octet:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(build_app(), list(arguments), env={"OCTET_URL": app.url}, catch_exceptions=False)

    return run


@pytest.fixture
def job_file(tmp_path: Path, runnable: dict[str, Any]) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(runnable | {"name": "compared"}))
    return str(path)


def test_a_comparison_is_submitted_paused_resumed_shown_and_cancelled(octet: Octet, client: Client, job_file: str) -> None:
    options = ("--levels", "fp32,O2", "--vary", "training.optimizer.learning_rate=1e-4,3e-4", "--seeds", "3", "--at-once", "4")
    options += ("--least-seeds", "3")
    shown = octet(
        "compare", job_file, *options, "--tolerance", "0.01", "--budget", "90m", "--set", "training.steps=7", "--detach"
    )
    assert shown.exit_code == 0, shown.output
    comparison_id = shown.stdout.split()[0]
    assert shown.stdout == f"{comparison_id} is running. Follow it with: octet compare {comparison_id}\n"
    spec = client.comparison(comparison_id).spec
    assert [arm.name for arm in spec.arms][::3] == ["fp32, learning_rate=0.0001", "O2, learning_rate=0.0003"]
    assert (spec.seeds, spec.least_seeds, spec.at_once, spec.tolerance) == (3, 3, 4, 0.01)
    assert spec.job.training.steps == 7
    assert spec.budget_slot_hours == 1.5
    refused = octet("compare", job_file, *options, "--budget", "soon")
    assert refused.exit_code == 2
    assert "hours or minutes above 0" in refused.output
    assert octet("pause", comparison_id).stdout == f"{comparison_id} is paused.\n"
    assert octet("resume", comparison_id).stdout == f"{comparison_id} is running.\n"
    assert comparison_id in octet("compare").stdout
    looked = octet("compare", comparison_id, "--detach")
    assert looked.exit_code == 1, "it has no answer yet"
    assert "cannot tell yet, it takes 3 seeds at least" in looked.stdout
    assert octet("cancel", comparison_id).stdout == f"{comparison_id} is cancelled.\n"
    followed = octet("compare", comparison_id, "--json")
    assert followed.exit_code == 1
    assert json.loads(followed.stdout)["state"] == "cancelled"
    assert Comparison.model_validate(json.loads(octet("compare", "--json").stdout)[0]).id == comparison_id
    as_job = octet("show", comparison_id)
    assert as_job.exit_code == 2
    assert f"octet compare {comparison_id}" in " ".join(as_job.stderr.replace("│", " ").split())
    assert octet("delete", comparison_id, "--yes").stdout == f"{comparison_id} is deleted.\n"
    assert octet("compare", comparison_id).exit_code != 0
    assert json.loads(octet("compare", "--json").stdout) == []


def test_whoever_loses_the_server_is_told_how_to_follow_again(octet: Octet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    lost = octet("compare", (gone := "cmp_" + 26 * "0"), "--detach", "--url", closed)
    assert lost.exit_code == 4
    assert f"octet compare {gone}" in " ".join(lost.stderr.split())


def test_defaults_follow_from_what_an_arm_changes(app: OctetApp, octet: Octet, job_file: str) -> None:
    recipes = ("--set", "precision={level: te, recipe: {margin: 1}}", "--vary", "precision.recipe.granularity=tensor,block")
    comparison_id = octet("compare", job_file, *recipes, "--detach").stdout.split()[0]
    with app.database.read() as session:
        row = store.comparisons.find(session, comparison_id)
        assert row is not None
        recipe = ComparisonSpec.read_stored(row.spec).child(1, 0, "").precision.recipe
    assert recipe is not None
    assert (recipe.margin, recipe.format) == (1, "E4M3")


def test_what_is_refused_names_option_or_field(octet: Octet, job_file: str) -> None:
    for arguments, words in (
        (("--levels", "O2"), "allowed: 2 to 32"),
        (("--levels", "O2,O9"), "levels.1"),
        (("--vary", "training.steps"), "path.to.field=value,value"),
        (("--vary", "training.step=1,2"), "Did you mean 'steps'?"),
        (("--vary", "resources.pool=cpu,gpu"), "Arm pool=gpu could not run here"),
    ):
        refused = octet("compare", job_file, *arguments)
        assert refused.exit_code == 2, arguments
        assert words in " ".join(re.sub(r"[│╭╰─╮╯]", " ", refused.stderr).split())
    assert octet("compare", "one-job").exit_code == 2
    assert octet("compare", "a", "b", "--seeds", "3").exit_code == 2


@pytest.fixture
def pairs(app: OctetApp, client: Client, runnable: dict[str, Any]) -> list[str]:
    """Two levels with three seeds that are over, and one of a fourth seed at O2 alone. O2 loses some 0.1 %."""
    ids = []
    for seed, level, loss in (
        (0, "fp32", 2.0),
        (1, "fp32", 2.1),
        (2, "fp32", 1.9),
        (0, "O2", 2.002),
        (1, "O2", 2.102),
        (2, "O2", 1.9021),
        (3, "O2", 5.0),
    ):
        training = runnable["training"] | {"seed": seed}
        job = client.submit(runnable | {"name": f"{level}-{seed}", "training": training, "precision": {"level": level}})
        rank = app.start_rank(job.id)
        rank.train(steps=3)
        rank.report(EvaluationReport(step=2, loss=loss + 1, tokens=512, metrics={"accuracy": 0.5}))
        rank.report(EvaluationReport(step=3, loss=loss, tokens=512, metrics={"accuracy": 0.6}))
        held = {"weights": 400, "gradients": 400 if level == "fp32" else 0}
        rank.succeed(summary_of(loss, memory_bytes=held))
        ids.append(job.id)
    return ids


def test_jobs_are_paired_where_their_seeds_are_equal(octet: Octet, pairs: list[str], tmp_path: Path) -> None:
    markdown, page = tmp_path / "report.md", tmp_path / "report.html"
    shown = octet("compare", *pairs, "--tolerance", "0.01", "--markdown", str(markdown), "--html", str(page))
    assert shown.exit_code == 0, shown.output
    assert "O2 loses at most 1.00% of fp32's loss: yes, with 95 % (gap between +0.0" in shown.stdout
    assert "; saves 50% of memory." in shown.stdout
    assert "Left out: seed 3 of O2: no job that is over has it (fp32)." in shown.stdout
    said = "O2 loses at most 1.00% of fp32&#x27;s loss: yes, with 95 %"
    assert said.replace("&#x27;", "'") in markdown.read_text()
    assert "| O2 | accuracy | 3 | 0.6000 | 0.6000 | +0.0000 | ± 0.0000 | 3 |" in markdown.read_text()
    html = page.read_text()
    assert said in html
    assert html.count("<svg") == 4, "two measures, their means and their gaps"
    assert not re.findall(r"(?:src|href)=|https?:|url\(|<script", html), "it loads nothing"
    report = ComparisonReport.model_validate(json.loads(octet("compare", *pairs, "--json").stdout))
    assert report.arms[1].seeds == (0, 1, 2)


def test_jobs_without_an_answer_exit_1_and_jobs_of_one_arm_2(octet: Octet, pairs: list[str]) -> None:
    open_one = octet("compare", pairs[0], pairs[3])
    assert open_one.exit_code == 1
    assert "it takes 2 seeds at least" in open_one.stdout
    same = octet("compare", *pairs[:3])
    assert same.exit_code == 2
    assert "differ in nothing but seed and name" in same.stderr


def test_a_chart_writes_out_what_is_no_markup_and_bears_one_point() -> None:
    drawn = chart("<b>", [Curve("a & b", 0, [(3, 1.0, 0.0)])])
    assert "&lt;b&gt;" in drawn
    assert "a &amp; b" in drawn
    assert "nan" not in drawn
    assert chart("none", [Curve("a", 0, [])]) == ""

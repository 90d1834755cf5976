"""The rules pass promtool, and every alert leads to a runbook that says what to do."""

import subprocess
from typing import Any

import pytest
import yaml

from tests.observability.live import ROOT

PROMETHEUS = ROOT / "deploy/prometheus"
TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "rules/octet.yml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]
CASES: list[dict[str, Any]] = [
    case for path in TESTS for group in yaml.safe_load(path.read_text())["tests"] for case in group.get("alert_rule_test", [])
]
"""The cases of all tests: what promtool runs."""


def run(*command: str) -> None:
    answer = subprocess.run(command, cwd=PROMETHEUS / "tests", capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_promtool_accepts_the_rules_and_the_configuration(promtool: str) -> None:
    run(promtool, "check", "rules", "../rules/octet.yml")
    run(promtool, "check", "config", "../prometheus.yml")


@pytest.mark.system
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_alerts_fire_and_stay_quiet(promtool: str, path: Any) -> None:
    run(promtool, "test", "rules", path.name)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_is_tested_both_ways(rule: dict[str, Any]) -> None:
    cases = {bool(case.get("exp_alerts")) for case in CASES if case["alertname"] == rule["alert"]}
    assert cases == {True, False}, "one case where it fires, one where it stays quiet"


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_leads_to_its_runbook(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"warning", "critical"}
    page = "{{ $externalURL }}/user/operations.md"  # compose and docs/operations.md let Prometheus serve docs/ there
    assert rule["annotations"]["runbook_url"] == f"{page}#{rule['alert'].lower()}"
    section = (ROOT / "docs/operations.md").read_text().partition(f"\n### {rule['alert']}\n")[2].partition("\n### ")[0]
    for part in ("**Means**", "**Look**", "**Do**"):
        assert part in section, f"the section {rule['alert']} of docs/operations.md lacks {part}"
    asks_for_nothing = section.partition("**Do**")[2].startswith(" nothing")
    assert not (asks_for_nothing and rule["labels"]["severity"] == "critical"), "critical means that somebody has to act"

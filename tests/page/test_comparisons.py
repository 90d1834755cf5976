"""A person sees comparisons and plans: figures are the API's, text is text, and what changes is shown."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octet.client.text import duration
from octet.service.jobs import attempts
from octet.service.store.jobs import lock_job
from tests.page.conftest import Site, ready, until
from tests.page.stage import HOSTILE, begin, compare, end, end_children, foresee, submit, summary

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.system
CHART = "document.querySelector(`[data-chart='Gap to the baseline']`).getAttribute('aria-label')"


def read(site: Site, name: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{site.url}/v1/comparisons/{site.jobs[name]}").json()
    return found


def show(page: "Page", site: Site, name: str) -> "Page":
    return ready(page, f"{site.url}/comparisons/{site.jobs[name]}")


def cells(page: "Page", table: str) -> list[list[str]]:
    """Read a table: a list of each row's texts."""
    rows = page.locator(f"[aria-label='{table}'] tbody tr").all()
    return [[text.strip() for text in row.locator("td").all_inner_texts()] for row in rows]


def test_a_comparison_begins_with_its_verdict_and_has_the_figures_of_its_report(page: "Page", compared_site: Site) -> None:
    show(page, compared_site, "finished")
    found = read(compared_site, "finished")
    arms = found["report"]["arms"]
    assert page.locator(".panel h2").first.inner_text() == "Verdict"
    assert page.locator(".answers p > span:last-child").all_inner_texts() == [f"{arm['words']}." for arm in arms[1:]]
    assert "finished: all are certain" in page.locator(".notice").inner_text()
    for row, arm in zip(cells(page, "Arms"), arms, strict=True):
        assert row[0] == arm["name"]
        assert arm["answer"] in row[1]
        assert row[4] == str(len(arm["seeds"]))
        assert row[5] == f"{arm['bytes_per_parameter']:.2f}"
        assert row[8] == duration(arm["train_time_s"])
    assert cells(page, "Arms")[2][2] == f"+{100 * arms[2]['gap']:.3f} %"
    assert cells(page, "Arms")[2][3] == f"± {100 * arms[2]['half_width']:.3f} %"
    last = [gap for gap in arms[2]["gaps"] if gap["measure"] == "loss"][-1]
    until(page, f"{CHART}.includes('At step 200') && {CHART}.includes('O2 +{100 * last['gap']:.3f} %')")
    page.get_by_label("Measure").select_option("accuracy")
    page.wait_for_url("**?measure=accuracy")
    worse = [gap for gap in arms[2]["gaps"] if gap["measure"] == "accuracy"][-1]["gap"]
    until(page, f"{CHART}.includes('O2 −{abs(worse):.4f}')")
    ready(page, page.url)
    assert page.get_by_label("Measure").input_value() == "accuracy"


def test_children_stand_by_arm_and_seed_and_link_to_their_jobs_and_back(page: "Page", compared_site: Site) -> None:
    show(page, compared_site, "running")
    children = read(compared_site, "running")["children"]
    assert [row[0] for row in cells(page, "Jobs by arm and seed")] == ["fp32", "O1", "O2", "noise"]
    for child in children:
        link = page.locator(f"[aria-label='{child['arm']}, seed {child['seed']}: {child['state']}']")
        assert link.get_attribute("href") == f"/jobs/{child['job_id']}"
    page.locator(".child small", has_text="60 %").wait_for()
    page.locator("[aria-label='fp32, seed 2: running']").click()
    page.locator(".headline", has_text="of a comparison: arm fp32, seed 2").wait_for()
    page.get_by_role("link", name="a comparison").click()
    page.locator("h1", has_text="still-running").wait_for()
    page.get_by_role("link", name="seed 0", exact=True).click()
    page.wait_for_url("**/compare?jobs=*")
    page.locator(".verdicts p").nth(1).wait_for()


@pytest.mark.parametrize(
    ("name", "state", "words"),
    [("wild", "too wild", "the setting is not calm"), ("baseline", "failed", HOSTILE), ("failing", "finished", "certain")],
)
def test_a_comparison_that_is_over_says_why_and_its_text_is_text(
    page: "Page", compared_site: Site, name: str, state: str, words: str
) -> None:
    show(page, compared_site, name)
    assert page.locator("h1 .state").inner_text().endswith(state)
    assert words in page.locator(".notice").inner_text()
    if name == "failing":
        page.locator(".answers", has_text=HOSTILE).wait_for()
    assert page.locator("main img, main script").count() == 0
    assert not page.get_by_role("button", name="Cancel", exact=True).is_visible()
    ready(page, f"{compared_site.url}/compare")
    assert page.locator("[aria-label=Comparisons] tr", has_text=words).count() >= 1
    assert page.locator("main img, main script").count() == 0
    assert page.title() == "Compare · Octet"


def test_a_comparison_changes_while_one_looks_and_can_be_stopped(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site()
    ready(page, f"{site.url}/compare")
    assert "octet compare job.yaml" in page.locator(".empty pre").inner_text()
    site.jobs["live"] = compare(site.world, "live")
    page.get_by_role("link", name="live", exact=True).click()
    page.locator("h1", has_text="live").wait_for()
    page.wait_for_selector("#connection[data-state=live]")
    site.world.dispatch()
    page.locator("[aria-label='fp32, seed 0: waiting']").wait_for()
    end_children(site.world, 3)
    page.locator("[aria-label='fp32, seed 0: succeeded']").wait_for()
    end_children(site.world, 99)
    page.locator("h1 .state", has_text="finished").wait_for()
    found = read(site, "live")["report"]
    assert page.locator(".answers p > span:last-child").all_inner_texts() == [f"{arm['words']}." for arm in found["arms"][1:]]
    assert all(arm["answer"] in {"yes", "no"} for arm in found["arms"][1:])
    site.jobs["other"] = compare(site.world, "other")
    show(page, site, "other")
    for name, state in (("Pause", "paused"), ("Resume", "running")):
        page.get_by_role("button", name=name, exact=True).click()
        page.locator("h1 .state", has_text=state).wait_for()
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel the comparison").click()
    page.locator("h1 .state", has_text="cancelled").wait_for()


def test_the_form_starts_a_comparison_of_levels(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site()
    ready(page, f"{site.url}/submit")
    page.get_by_text("Compare levels, or other settings", exact=True).click()
    page.get_by_role("checkbox", name="fp32").check()
    page.get_by_text("Choose a second level").wait_for()
    page.get_by_role("checkbox", name="O2", exact=True).check()
    page.locator("#field-seeds").fill("1")
    page.locator("#field-tolerance").fill("0.5")
    page.wait_for_url("**?levels=fp32,O2&seeds=1&tolerance=0.5")
    start = page.get_by_role("button", name="Start the comparison")
    until(page, "!document.querySelector('button[type=submit]').disabled")
    start.click()
    page.locator("#field-seeds-note", has_text="2").wait_for()
    page.locator("#field-seeds").fill("3")
    page.locator(".result", has_text="It can run").wait_for()
    until(page, "document.querySelectorAll(\"[aria-label='Plan by level'] tbody tr\").length === 2")  # of all levels before
    assert [row[0] for row in cells(page, "Plan by level")] == ["fp32", "O2"]
    page.locator("summary", has_text="curl").click()
    assert page.get_by_label("With this job file as job.yaml").inner_text() == (
        "octet compare job.yaml --levels fp32,O2 --seeds 3 --tolerance 0.5"
    )
    sent = json.loads(page.get_by_label("One command").inner_text().partition("-d '")[2].removesuffix("'"))
    until(page, "!document.querySelector('button[type=submit]').disabled")
    start.dblclick()
    page.wait_for_url("**/comparisons/cmp_*")
    (spec,) = [each["spec"] for each in httpx.get(f"{site.url}/v1/comparisons").json()["data"]]
    assert (spec["levels"], spec["seeds"], spec["tolerance"]) == (["fp32", "O2"], 3, 0.5)
    assert spec["job"]["data"]["path"] == sent["job"]["data"]["path"]
    assert site.world.all_jobs() == []


def test_the_form_starts_a_comparison_of_other_settings(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site()
    ready(page, f"{site.url}/submit")
    page.get_by_text("Compare levels, or other settings", exact=True).click()
    page.locator("#field-vary").fill("{training.optimizer.learning_rate: [1e-4, 3e-4]}")
    page.locator("#field-baseline").fill("learning_rate=5")
    page.locator("#field-at_once").fill("4")
    start = page.get_by_role("button", name="Start the comparison")
    until(page, "!document.querySelector('button[type=submit]').disabled")
    start.click()
    page.locator("#field-baseline-note", has_text="learning_rate=0.0001").wait_for()
    page.locator("#field-baseline").fill("learning_rate=0.0003")
    page.locator(".result", has_text="It can run").wait_for()
    page.locator("summary", has_text="curl").click()
    options = "--vary training.optimizer.learning_rate=0.0001,0.0003 --baseline learning_rate=0.0003 --at-once 4"
    assert page.get_by_label("With this job file as job.yaml").inner_text() == f"octet compare job.yaml {options}"
    page.reload()
    page.locator(".result", has_text="It can run").wait_for()
    assert page.locator("#field-vary").input_value() == "{training.optimizer.learning_rate: [0.0001, 0.0003]}"
    until(page, "!document.querySelector('button[type=submit]').disabled")
    start.click()
    page.wait_for_url("**/comparisons/cmp_*")
    (spec,) = [each["spec"] for each in httpx.get(f"{site.url}/v1/comparisons").json()["data"]]
    assert (spec["vary"], spec["baseline"]) == ({"training.optimizer.learning_rate": [1e-4, 3e-4]}, "learning_rate=0.0003")
    assert (spec["at_once"], spec["levels"]) == (4, [])


def test_a_plan_stands_beside_the_form_and_beside_the_memory_of_a_job(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site()
    ready(page, f"{site.url}/submit")
    page.get_by_label("pool", exact=True).select_option("h100")
    page.locator("[aria-label='Plan by level'] th", has_text="Fits").wait_for()
    plan = httpx.post(f"{site.url}/v1/plans", json={"job": spec_of(page)}).json()
    assert [row[0] for row in cells(page, "Plan by level")] == [row["level"] for row in plan["rows"]]
    assert {row[2] for row in cells(page, "Plan by level")} == {"states do"}
    for shown, row in zip(cells(page, "Plan by level"), plan["rows"], strict=True):
        (fit,), words = row["fits"], " ".join(shown[4:]).replace("−", "-")
        numbers = [float(number) for number in re.findall(r"\d[\d.]*(?:e-?\d+)?", words)]
        steps, floor = fit["predicted"], fit["floor"]
        assert numbers == pytest.approx([steps["least_s"], steps["most_s"], floor["hours"], floor["price"]], rel=0.006)
    page.get_by_label("pool", exact=True).select_option("cpu")
    page.get_by_text("Pool 'cpu' states no memory: set its memory_per_device_bytes").wait_for()
    page.get_by_label("pool", exact=True).select_option("h100")
    page.locator("[aria-label='Plan by level'] th", has_text="Fits").wait_for()
    page.get_by_role("radio", name="auto").check()
    assert "level: auto" in page.locator("#yaml").input_value()
    job_id = submit(site.world, "chosen", "auto", pool="h100")
    foresee(site.world, job_id, "O2-8bit", verdict="tight", remedies=("O3-split-8bit",))
    ready(page, f"{site.url}/jobs/{job_id}")
    words = page.locator(".side").inner_text()
    assert "auto chose O2-8bit; a peak of" in words
    assert "on devices of 85.9 GB: it may not fit, micro-batches up to 512 surely do" in words
    assert "It would surely fit with one of: O3-split-8bit." in words


def spec_of(page: "Page") -> Any:
    """Return the job that the form holds, by the API's own reading of what it would send."""
    page.locator("summary", has_text="curl").click()
    return json.loads(page.get_by_label("One command").inner_text().partition("-d '")[2].removesuffix("'"))


def test_a_pool_shows_how_its_plans_held_and_a_job_that_makes_way_says_so(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site()
    world = site.world
    for place in range(10):
        job_id = submit(world, f"planned-{place}", "O2", pool="h100")
        foresee(world, job_id, "O2")
        rank = begin(world, job_id)
        end(rank, summary=summary().model_copy(update={"peak_memory_bytes": None}))
        world.launcher.exit(rank.ref)
        world.dispatch()
    ratio = httpx.get(f"{site.url}/v1/pools").json()["data"][1]["measured_to_planned"]
    ready(page, f"{site.url}/cluster")
    assert f"{100 * ratio:.1f} %" in cells(page, "Pools")[1]
    assert "Step of planned" in page.locator("main").inner_text()
    assert "85.9 GB" in cells(page, "Pools")[1]
    ready(page, f"{site.url}/jobs/{job_id}")
    assert f"Measured: {100 * ratio:.1f} % of the plan." in page.locator(".side").inner_text()
    job_id = submit(world, "makes-way")
    begin(world, job_id)
    ready(page, f"{site.url}/jobs/{job_id}")
    page.wait_for_selector("#connection[data-state=live]")
    with world.database.write() as session:
        row = lock_job(session, job_id)
        assert row is not None
        attempts.make_way(session, row, world.database.now(session), "the server stops")
    page.locator(".notice", has_text="It makes way: its last event says why").wait_for()


def test_windows_of_any_width_hold_comparisons(page: "Page", compared_site: Site) -> None:
    for path in ("/compare", "/submit?levels=fp32,O2", *[f"/comparisons/{each}" for each in compared_site.jobs.values()]):
        ready(page, f"{compared_site.url}{path}")
        for width in (1360, 390):
            page.set_viewport_size({"width": width, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path

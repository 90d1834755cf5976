"""A person sees and does: lists, filters, keys, one job, comparisons, submissions. Text is text, figures are the API's."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octet.api_schemas import JobSpec
from octet.client.text import num_bytes, number
from octet.service.store import queue
from tests.kit.waiting import LONG_S
from tests.page.conftest import Site, drawn, label_of, ready, until
from tests.page.stage import HOSTILE, begin, submit, train

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

pytestmark = pytest.mark.system
LIST_BYTES, JOB_BYTES = 30_000, 60_000
FAMILIES = ("gpt-tiny-fp32", "gpt-tiny-bf16-amp", "gpt-tiny-te", "gpt-tiny-O2", "resumed")
KEYS = {"api_keys": ("operator-key-0123456789", "blue:blue-key-0123456789", "red:red-key-0123456789")}


def fact(page: "Page", name: str) -> str:
    return page.locator(f".facts > div:has(dt:text-is('{name}')) strong").inner_text()


def names(page: "Page") -> list[str]:
    return page.locator(".row .name a").all_inner_texts()


class Scripts:
    """The JavaScript that a page has asked for."""

    def __init__(self, page: "Page") -> None:
        self.bodies: dict[str, int] = {}
        page.on("response", lambda answer: self._take(answer))

    def _take(self, answer: Any) -> None:
        if answer.url.endswith(".js"):
            self.bodies[answer.url] = int(answer.headers["content-length"])


def test_the_list_and_a_chart_need_little_javascript(context: "BrowserContext", site: Site) -> None:
    """Count what comes before the first paint; the rest is held back."""
    for path, selector, most, later in (
        ("/", ".row .name a", LIST_BYTES, r"/(shell|live|stream-worker|views/jobs-more)\.js$"),
        (f"/jobs/{site.jobs['running']}", ".legend b", JOB_BYTES, r"/(shell|live|actions|stream-worker|views/job-more)\.js$"),
    ):
        page = context.new_page()
        page.route(re.compile(later), lambda route: None)
        scripts = Scripts(page)
        page.goto(f"{site.url}{path}")
        page.wait_for_selector(selector)
        assert 0 < sum(scripts.bodies.values()) <= most, scripts.bodies
        page.unroute_all(behavior="ignoreErrors")
        page.close()


def test_the_list_shows_what_the_api_lists(page: "Page", site: Site) -> None:
    ready(page, f"{site.url}/")
    rows = httpx.get(f"{site.url}/v1/rows", params={"limit": 100}).json()["data"]
    assert names(page) == [row["name"] for row in rows]
    for place, row in enumerate(rows):
        shown = page.locator(".row").nth(place)
        assert shown.locator(".loss").inner_text() == number(row["loss"])
        assert shown.locator(".evaluation").inner_text() == number(row["best_evaluation_loss"])
        assert shown.locator(".level").inner_text() == row["level"]
    assert "4 of 4 slots" in page.locator(".pool").first.inner_text()
    assert "3 waiting" in page.locator(".pool").first.inner_text()


def test_filters_live_in_the_address(page: "Page", site: Site) -> None:
    ready(page, f"{site.url}/")
    page.get_by_role("button", name="Failed").click()
    until(page, "document.querySelectorAll('.row').length === 1")
    assert "state=failed" in page.url
    page.get_by_label("Search", exact=True).fill("no such job")
    page.get_by_text("No job matches").wait_for()
    assert "“no such job”, failed" in page.locator(".empty").inner_text()
    page.get_by_role("link", name="Show all jobs").click()
    until(page, "document.querySelectorAll('.row').length > 5")
    ready(page, f"{site.url}/?q=tiny-o&level=O3")
    assert names(page) == ["gpt-tiny-O3"]
    assert page.get_by_label("Level", exact=True).input_value() == "O3"


def test_everything_can_be_done_by_keys(page: "Page", own_site: Callable[..., Site]) -> None:
    """Submit, watch, compare, pause, resume, cancel, retry and delete without a pointer."""
    site = own_site()
    page.emulate_media(reduced_motion="reduce")
    ready(page, f"{site.url}/")
    page.get_by_text("No job yet").wait_for()
    assert "octet submit" in page.locator(".empty pre").inner_text()
    press(page, "g", "s")
    page.wait_for_selector("#field-name")
    for name in ("first", "second"):
        page.locator("#field-name").focus()
        page.keyboard.press("Control+a")
        page.keyboard.type(name)
        page.get_by_text("It can run").wait_for()
        until(page, "!document.querySelector('button[type=submit]').disabled")
        page.keyboard.press("Enter")
        page.wait_for_url("**/jobs/job_*")
        page.locator("h1", has_text=name).wait_for()
        press(page, "g", "s")
        page.wait_for_selector("#field-name")
    press(page, "g", "j")
    until(page, "document.querySelectorAll('.row').length === 2")
    page.wait_for_selector("#connection[data-state=live]")
    press(page, "j", "x", "j", "x", "c")
    page.wait_for_url("**/compare?jobs=*,*")
    page.locator(".chip").nth(1).wait_for()
    page.go_back()
    page.wait_for_selector("#connection[data-state=live]")
    press(page, "?")
    page.get_by_role("dialog", name="Keys").wait_for()
    press(page, "Escape")
    press(page, "j", "Enter")
    page.locator("h1", has_text="second").wait_for()
    stop_and_go_on(page)


def stop_and_go_on(page: "Page") -> None:
    for name, state in (("Pause", "paused"), ("Resume", "waiting")):
        page.get_by_role("button", name=name, exact=True).focus()
        page.keyboard.press("Enter")
        page.locator("h1 .state", has_text=state).wait_for()
    cancel(page)
    retry = page.get_by_role("button", name="Retry", exact=True)
    retry.focus()
    page.keyboard.press("Enter")
    page.locator("h1 .state", has_text="waiting").wait_for()
    assert not retry.is_visible()
    cancel(page)
    press_and_confirm(page, "Delete", "Delete the job")
    until(page, "document.querySelectorAll('.row').length === 1")


def cancel(page: "Page") -> None:
    press_and_confirm(page, "Cancel", "Cancel the job")
    page.locator("h1 .state", has_text="cancelled").wait_for()


def press_and_confirm(page: "Page", name: str, confirmation: str) -> None:
    page.get_by_role("button", name=name, exact=True).focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name=confirmation).focus()
    page.keyboard.press("Enter")


def press(page: "Page", *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


@pytest.mark.parametrize("name", FAMILIES)
def test_figures_are_those_of_the_api(page: "Page", site: Site, name: str) -> None:
    job_id = site.jobs[name]
    ready(page, site.job(name))
    page.wait_for_selector("#connection[data-state=live]")
    api = f"{site.url}/v1/jobs/{job_id}"
    job, points = httpx.get(api).json(), httpx.get(f"{api}/metrics").json()["data"]
    measured = httpx.get(f"{api}/measurements").json()
    assert fact(page, "Step") == str(points[-1]["step"])
    assert fact(page, "Loss") == number(points[-1]["loss"]) == number(job["progress"]["loss"])
    assert fact(page, "Best evaluation") == number(min(each["evaluation_loss"] for each in points if each["evaluation_loss"]))
    speed = job["summary"]["tokens_per_s"] if job["summary"] else job["progress"]["tokens_per_s"]
    assert fact(page, "Tokens/s") == f"{speed:,.0f}"
    size, unit = fact(page, "Memory").split()
    assert (float(size), unit) == (float(num_bytes(sum(measured["memory"]["held"].values())).split()[0]), "MB")
    label = page.locator("canvas[data-chart=Loss]").get_attribute("aria-label") or ""
    assert f"step {points[-1]['step']}" in label
    assert f"evaluation {number(points[-1]['evaluation_loss'] or last_evaluation(points))}" in label
    rows = page.locator("[aria-label='FP8 health by layer'] tbody tr")
    assert rows.count() == len(measured["layers"])
    assert measured["layers"][0]["layer"] in rows.first.inner_text()


def last_evaluation(points: list[dict[str, Any]]) -> float:
    return float([each["evaluation_loss"] for each in points if each["evaluation_loss"] is not None][-1])


def test_a_label_says_what_is_under_the_cursor(page: "Page", site: Site) -> None:
    ready(page, f"{site.job('gpt-tiny-O2')}?smooth=0")
    canvas = page.locator("canvas[data-chart=Loss]")
    points = httpx.get(f"{site.url}/v1/jobs/{site.jobs['gpt-tiny-O2']}/metrics").json()["data"]
    canvas.focus()
    for key, step in (("Home", 1), ("ArrowRight", 2), ("End", 200), ("ArrowLeft", 199)):
        page.keyboard.press(key)
        drawn(page)
        assert f"At step {step}: training {number(points[step - 1]['loss'])}" in label_of(page)


def test_a_chart_without_points_invents_no_numbers(page: "Page", site: Site) -> None:
    ready(page, site.job("queued-0"))
    page.get_by_text("Counted from live tensors after the first step.").wait_for()
    drawn(page)
    inked = """[...document.querySelectorAll("canvas")].map((canvas) =>
      canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value > 0))"""
    assert page.evaluate(inked) == [False, False]
    assert label_of(page) == "Loss: after the first step"


def test_zoom_axis_and_smoothing_live_in_the_address(page: "Page", site: Site) -> None:
    ready(page, site.job("gpt-tiny-O2"))
    canvas = page.locator("canvas[data-chart=Loss]")
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 120, steps=4)
    page.mouse.up()
    page.wait_for_url("**zoom=*")
    page.get_by_label("Smoothing").select_option("50")
    page.get_by_role("checkbox", name="log").check()
    page.wait_for_url("**log=1*")
    query = page.url.partition("?")[2]
    assert "smooth=50" in query
    ready(page, page.url)
    assert page.get_by_role("button", name="Whole curve").is_visible()
    assert page.get_by_role("checkbox", name="log").is_checked()
    canvas.focus()
    page.keyboard.press("Escape")
    until(page, "!location.search.includes('zoom')")
    page.get_by_label("Horizontal axis").select_option("tokens")
    page.wait_for_url("**x=tokens*")
    drawn(page)
    assert "At tokens 819k" in label_of(page)


def test_markup_in_logs_events_and_names_is_text(page: "Page", site: Site) -> None:
    ready(page, site.job("diverged"))
    page.locator(".log", has_text=HOSTILE).wait_for()
    page.locator(".events", has_text=HOSTILE).wait_for()
    assert page.locator("main img, main script").count() == 0
    assert page.title() == "deit-tiny-hot · Octet"
    assert "diverged: the loss rose" in page.locator(".notice").inner_text()
    assert "learning_rate" in page.locator(".notice .muted").inner_text()


def test_a_view_never_shows_the_one_before(page: "Page", site: Site) -> None:
    """The next job's answers are held back: nothing of the last job may stand meanwhile."""
    ready(page, f"{site.url}/?q=gpt-tiny-O")
    page.route(re.compile(r"/v1/jobs/"), lambda route: None)
    page.get_by_role("link", name="gpt-tiny-O3").click()
    page.wait_for_selector("main[aria-busy=true]")
    assert page.locator(".row, .facts, .notice").count() == 0
    page.unroute_all(behavior="ignoreErrors")
    page.go_back()
    until(page, "document.querySelectorAll('.row').length === 3")
    assert page.get_by_label("Search", exact=True).input_value() == "gpt-tiny-O"


def test_a_comparison_judges_by_the_last_common_evaluation(page: "Page", site: Site) -> None:
    chosen = [site.jobs[name] for name in ("gpt-tiny-fp32", "gpt-tiny-O2")]
    ready(page, f"{site.url}/compare?jobs={','.join(chosen)}")
    curves = [httpx.get(f"{site.url}/v1/jobs/{each}/metrics").json()["data"] for each in chosen]
    base, other = [last_evaluation(curve) for curve in curves]
    verdict = page.locator(".verdicts").inner_text()
    assert f"At step 200 the evaluation loss of gpt-tiny-O2 is {other - base:.4f}" in verdict
    assert "above gpt-tiny-fp32" in verdict
    assert "precision.level" in page.locator("[aria-label='Fields that differ']").inner_text()
    page.get_by_label("Baseline", exact=True).select_option(label="baseline: gpt-tiny-O2")
    page.wait_for_url(f"**base={chosen[1]}*")
    page.locator(".verdicts", has_text="below gpt-tiny-O2").wait_for()
    page.get_by_role("button", name="Remove gpt-tiny-O2").click()
    page.wait_for_url(f"**/compare?jobs={chosen[0]}")


def test_seeds_of_the_baseline_make_a_band(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site()
    training = site.world.spec.training.model_dump(mode="json") | {"steps": 60}
    ids = []
    for seed in (0, 1, 2):
        ids.append(submit(site.world, f"seed-{seed}", "fp32", training={**training, "seed": seed, "global_batch_size": 4}))
        train(site.world, begin(site.world, ids[-1]), range(1, 61), seed=10 * seed)
    ready(page, f"{site.url}/compare?jobs={','.join(ids)}")
    label = page.locator("canvas[data-chart='Difference of the loss to the baseline']").get_attribute("aria-label") or ""
    assert "seeds of the baseline" in label
    assert "The band is what the baseline's seeds differ by" in page.locator("main").inner_text()


def test_a_form_and_its_job_file_are_one(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site()
    ready(page, f"{site.url}/submit")
    page.locator("#field-training-steps").fill("12")
    assert "steps: 12" in page.locator("#yaml").input_value()
    page.locator("input[name=level][value='O3-split-8bit']").check()
    assert "level: O3-split-8bit" in page.locator("#yaml").input_value()
    page.locator("#yaml").fill(page.locator("#yaml").input_value().replace("steps: 12", "steps: 0"))
    page.locator("#field-training-steps-note", has_text="greater than or equal to 1").wait_for()
    assert page.locator("#field-training-steps").get_attribute("aria-invalid") == "true"
    assert page.locator("button[type=submit]").is_disabled()
    page.locator("#yaml").fill("name: x\n  model: y")
    page.locator(".result", has_text="line 2").wait_for()


def test_no_bar_is_drawn_of_bytes_that_are_not_known(page: "Page", own_site: Callable[..., Site]) -> None:
    """The catalog has the bytes of presets. An empty bar beside the others would say that a level holds nothing."""
    site = own_site()
    ready(page, f"{site.url}/submit")
    rows = page.locator(".choice-row")
    rows.nth(1).wait_for()
    assert page.locator(".choice-row .bar").count() == rows.count() - 1, "auto has none"
    page.get_by_text("This server traces no peaks").wait_for()
    sizes = "{hidden_size: 64, num_layers: 2, num_heads: 4, vocab_size: 256}"
    page.locator("#yaml").fill(page.locator("#yaml").input_value().replace("{preset: gpt-tiny}", sizes))
    until(page, "document.querySelectorAll('.choice-row .bar').length === 0")


def test_a_double_click_makes_one_job(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site()
    ready(page, f"{site.url}/submit")
    until(page, "!document.querySelector('button[type=submit]').disabled")
    sent: list[str] = []
    page.on(
        "request", lambda request: sent.append(request.headers.get("idempotency-key", "")) if is_submission(request) else None
    )
    page.locator("button[type=submit]").dblclick()
    page.evaluate("document.querySelector('form.submit')?.requestSubmit()")
    page.wait_for_url("**/jobs/job_*")
    assert len(site.world.all_jobs()) == 1
    assert len(sent[0]) == 32
    spec = httpx.get(f"{site.url}/v1/jobs").json()["data"][0]["spec"]
    page.wait_for_selector("main[aria-busy=false]")
    page.get_by_role("button", name="Copy as…").click()
    curl = page.get_by_label("The same as curl").inner_text()
    assert page.locator("dialog").evaluate("dialog => dialog.scrollWidth <= dialog.clientWidth"), "its left half was hidden"
    copied = json.loads(curl.partition("-d '")[2].removesuffix("'"))
    assert JobSpec.model_validate(copied) == JobSpec.model_validate(spec)
    assert spec.keys() - copied.keys() >= {"adapter", "export"}, "they are null by default"
    page.get_by_role("button", name="Close").click()
    page.get_by_role("link", name="Clone").click()
    page.wait_for_selector("#yaml")
    page.get_by_text("It can run").wait_for()
    page.locator("button[type=submit]").click()
    page.wait_for_url("**/jobs/job_*")
    first, second = [httpx.get(f"{site.url}/v1/jobs").json()["data"][place]["spec"] for place in (0, 1)]
    assert first == second


def is_submission(request: Any) -> bool:
    return bool(request.method == "POST" and request.url.endswith("/v1/jobs"))


def test_keys_stay_in_the_tab_and_tenants_apart(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site(**KEYS)
    headers = {name: {"Authorization": f"Bearer {name}-key-0123456789"} for name in ("blue", "red")}
    body = site.world.spec.model_dump(mode="json") | {"data": {"path": "/usr/share/doc"}, "name": "blue-job"}
    job = httpx.post(f"{site.url}/v1/jobs", json=body, headers=headers["blue"], timeout=LONG_S).json()
    page.goto(f"{site.url}/")
    page.get_by_label("API key").fill("red-key-0123456789")
    page.keyboard.press("Enter")
    page.get_by_text("No job yet").wait_for()
    page.goto(f"{site.url}/jobs/{job['id']}")
    page.get_by_text("there is no job").wait_for()
    page.evaluate("sessionStorage.setItem('octet-key', 'blue-key-0123456789')")
    ready(page, f"{site.url}/jobs/{job['id']}")
    page.locator("h1", has_text="blue-job").wait_for()
    page.wait_for_selector("#connection[data-state=live]")
    assert page.context.cookies() == []
    assert page.evaluate("Object.keys(localStorage)") == []
    assert "key" not in page.url
    stranger = page.context.new_page()
    stranger.goto(f"{site.url}/")
    stranger.get_by_label("API key").wait_for()


def test_who_has_no_key_reads_how_people_sign_in(page: "Page", own_site: Callable[..., Site]) -> None:
    provider = {"oidc_issuer": "https://login.example.com", "oidc_audience": "octet", "oidc_roles": {"*": "guests:viewer"}}
    site = own_site(**KEYS, **provider)
    page.goto(f"{site.url}/")
    page.get_by_text(
        f"People sign in at https://login.example.com: enter what octet login --token --url {site.url} prints."
    ).wait_for()
    page.goto(f"{own_site(**KEYS).url}/")
    page.get_by_label("API key").wait_for()
    page.wait_for_function("!document.querySelector('form.key').textContent.includes('sign in')")


def test_a_panel_that_fails_says_so_alone(page: "Page", site: Site) -> None:
    page.route(
        re.compile(r"/checkpoints"), lambda route: route.fulfill(status=503, json={"title": "Not ready", "detail": "later"})
    )
    ready(page, site.job("gpt-tiny-O2"))
    page.locator(".panel:has(h2:text-is('Checkpoints')) [role=alert]", has_text="later").wait_for()
    assert fact(page, "Step") == "200"
    page.locator(".events li").nth(3).wait_for()


def test_an_answer_that_breaks_off_changes_nothing(page: "Page", own_site: Callable[..., Site]) -> None:
    """A server that is killed sends half an answer, with status 200. Errors of the page's console fail this test."""
    site = own_site()
    job_id = submit(site.world, "watched")
    rank = begin(site.world, job_id)
    train(site.world, rank, range(1, 6))
    ready(page, f"{site.url}/jobs/{job_id}")
    page.wait_for_selector("#connection[data-state=live]")
    broken: list[str] = []

    def break_off(route: Any) -> None:
        broken.append(route.request.url)
        route.fulfill(status=200, content_type="application/json", body='{"object": "job", "id":')

    page.route(re.compile(rf"/v1/jobs/{job_id}$"), break_off)
    site.world.pause(job_id)
    page.locator("h1 .state", has_text="pausing").wait_for()
    train(site.world, rank, range(6, 9))
    page.locator(".facts strong", has_text=re.compile("^8$")).wait_for()
    assert broken
    assert page.locator("h1").inner_text().startswith("watched")


def test_the_cluster_names_the_loops_that_run_and_those_that_do_not(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site()
    now = site.world.clock.now()
    with site.world.database.write() as session:
        queue.note_loops(session, "here", "token", {"place": 300, "watch": 300, "launch": -60}, now)
    ready(page, f"{site.url}/cluster")
    service = page.locator(".panel:has(h2:text-is('Service'))")
    service.get_by_text("Loops of the dispatcher that make no progress: launch.").wait_for()
    service.get_by_text("Loops of the dispatcher that run: place, watch.").wait_for()


def test_the_cluster_shows_the_alerts_that_fire(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site(runbooks_url="https://docs.example.com/octet/operations.html")
    alerts = page.locator(".panel:has(h2:text-is('Alerts'))")
    ready(page, f"{site.url}/cluster")
    alerts.get_by_text("No alert fires.").wait_for()
    job_id = submit(site.world, "lost")
    train(site.world, begin(site.world, job_id), range(1, 6))
    site.world.clock.turn(61)
    ready(page, f"{site.url}/cluster")
    seen = [row.split("\t") for row in alerts.locator("tbody tr").all_inner_texts()]
    assert [row[:2] for row in seen] == [
        ["critical", "No dispatcher leads: jobs are taken and none is started"],
        ["warning", "Job lost has not reported for more than 30 s"],
    ]
    assert alerts.get_by_role("link", name="Job lost").get_attribute("href") == f"/jobs/{job_id}"
    page_of_runbooks = site.world.settings.runbooks_url
    assert alerts.get_by_role("link", name="runbook").first.get_attribute("href") == f"{page_of_runbooks}#octetnoleader"


def test_a_narrow_window_shows_name_level_state_and_progress(page: "Page", site: Site) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    ready(page, f"{site.url}/?q=gpt-on-source-code")
    row = page.locator(".row").first
    for selector in (".name a", ".level", ".state", ".progress"):
        box = row.locator(selector).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
    assert row.locator(".name a").evaluate("element => element.scrollWidth <= element.clientWidth")
    for path in ("/", f"/jobs/{site.jobs['diverged']}", f"/compare?jobs={site.jobs['running']}", "/submit", "/cluster"):
        ready(page, f"{site.url}{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
    lines = lines_of_cells(page)
    assert {words: number for words, number in lines.items() if number > (1 if len(words) <= 20 else 4)} == {}
    assert {"wide-0", "warning"} <= set(lines)


def lines_of_cells(page: "Page") -> dict[str, int]:
    """Return the lines that the texts of tables take, by text. A table may be scrolled sideways."""
    program = """() => [...document.querySelectorAll("td")].flatMap((cell) => {
      const [range, texts] = [document.createRange(), document.createTreeWalker(cell, NodeFilter.SHOW_TEXT)];
      const found = [];
      while (texts.nextNode()) {
        range.selectNode(texts.currentNode);
        found.push([texts.currentNode.textContent, range.getClientRects().length]);
      }
      return found;
    })"""
    return dict(page.evaluate(program))

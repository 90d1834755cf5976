"""Many jobs and long curves: what is in the document does not grow with them, and no spike is lost. No time is measured."""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import httpx
import pytest

from octet.service.jobs import commands
from octet.service.jobs.requests import Request
from octet.service.store import curves
from octet.service.store.jobs import newest_job
from tests.page.conftest import PageClock, Site, label_of, ready
from tests.page.stage import begin, submit
from tests.service.world import step

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.system
NUM_JOBS, MOST_NODES, MOST_LIST_BYTES = 10_000, 1_000, 60_000
NUM_STEPS, SPIKE_AT, SPIKE, MOST_CURVE_BYTES = 100_000, 61_803, 50.0, 150_000


def test_ten_thousand_jobs_are_a_thousand_nodes(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site()
    world = site.world
    for begin_at in range(0, NUM_JOBS, 500):
        requests = [
            Request(world.spec.model_copy(update={"name": f"job-{place}"})) for place in range(begin_at, begin_at + 500)
        ]
        with world.database.write() as session:
            commands.submit_all(session, requests, world.database.now(session), newest_job(session).id)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/v1/rows" in request.url else None)
    ready(page, f"{site.url}/")
    assert page.locator(".row .name a").first.inner_text() == f"job-{NUM_JOBS - 1}"
    assert page.locator("[role=table]").get_attribute("aria-rowcount") == str(NUM_JOBS + 1)
    for place, name in ((1.0, "job-0"), (0.5, "job-5000")):
        asked.clear()
        page.evaluate(f"scrollTo(0, document.documentElement.scrollHeight * {place})")
        page.locator(".row .name a", has_text=re.compile(f"^{name}$")).first.wait_for()
        assert len(asked) <= 2
        assert page.evaluate("document.querySelectorAll('*').length") <= MOST_NODES
    assert len(httpx.get(f"{site.url}/v1/rows?limit=100").content) <= MOST_LIST_BYTES


def test_a_spike_of_one_step_in_a_hundred_thousand_is_seen(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site()
    world = site.world
    job_id = submit(world, "long", steps=2 * NUM_STEPS)
    rank = begin(world, job_id)
    rank.send(step(1, 2.0))
    write_curve(site, job_id, rank.order.attempt_id)
    rank.send(step(NUM_STEPS, 2.0))
    clock = PageClock(page)
    ready(page, f"{site.url}/jobs/{job_id}?smooth=0")
    page.wait_for_selector("#connection[data-state=live]")
    clock.stop()
    rank.send(*[step(NUM_STEPS + number, 2.0) for number in range(1, 21)])
    clock.hears(NUM_STEPS + 20, "points")
    clock.run()
    assert f"step {NUM_STEPS + 20:,}:" in label_of(page)
    clock.go_on()
    assert inked(page) == {"around": False, "spike": True}
    assert len(httpx.get(f"{site.url}/v1/jobs/{job_id}/curve?points=800").content) <= MOST_CURVE_BYTES


def write_curve(site: Site, job_id: str, attempt_id: str) -> None:
    """Write the steps between the first and the last into the store, in parts as reports would."""
    now = site.world.clock.now()
    points = [step(number, SPIKE if number == SPIKE_AT else 2 + (number % 7) / 100) for number in range(2, NUM_STEPS)]
    with site.world.database.write() as session:
        for first in range(0, len(points), curves.MAX_STEPS_PER_PART):
            part = points[first : first + curves.MAX_STEPS_PER_PART]
            moments = [now + timedelta(seconds=each.step) for each in part]
            curves.add_parts(session, [curves.pack_curve(job_id, attempt_id, moments, part)])


def inked(page: "Page") -> dict[str, bool]:
    """Look for drawn pixels in the upper half of the chart: in the columns of the spike, and a little to the left of them."""
    program = """async ([share]) => {
      await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
      const [canvas] = document.querySelectorAll("canvas");
      const pen = canvas.getContext("2d");
      const [left, right] = [54, canvas.width - 14];
      const center = Math.round(left + share * (right - left));
      const coloured = (from, width) => {
        const {data} = pen.getImageData(from, 20, width, canvas.height / 2 - 20);
        for (let at = 0; at < data.length; at += 4) {
          const [red, green, blue, alpha] = data.slice(at, at + 4);
          if (alpha > 20 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60) return true;
        }
        return false;
      };
      return {spike: coloured(center - 4, 9), around: coloured(center - 40, 20)};
    }"""
    found: dict[str, bool] = page.evaluate(program, [SPIKE_AT / (NUM_STEPS + 20)])
    return found

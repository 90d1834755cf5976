"""Changes are shown: nine tabs on one stream, a server that is killed twenty times, an attempt that goes back."""

import json
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from octet.api_schemas import FailureReason
from octet.service.settings import Settings
from tests.kit.ports import free_port
from tests.kit.waiting import wait_until
from tests.page.conftest import PageClock, Site, label_of, ready, until
from tests.page.stage import begin, end, submit, train
from tests.page.test_views import fact
from tests.service.world import World

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

pytestmark = pytest.mark.system
NUM_TABS, NUM_KILLS = 9, 20


def test_nine_tabs_are_live_on_one_stream(context: "BrowserContext", own_site: Callable[..., Site]) -> None:
    """A stream in each tab would block the seventh: a browser opens six connections to a host.

    Each says what is new within two seconds, by its own clock.
    """
    site = own_site()
    job_id = submit(site.world, "watched", steps=1000)
    rank = begin(site.world, job_id)
    train(site.world, rank, range(1, 11))
    tabs = [context.new_page() for _ in range(NUM_TABS)]
    clocks = [PageClock(tab) for tab in tabs]
    for tab in tabs:
        ready(tab, f"{site.url}/" if tab is tabs[-1] else f"{site.url}/jobs/{job_id}")
    for tab, clock in zip(tabs, clocks, strict=True):
        tab.wait_for_selector("#connection[data-state=live]")
        clock.stop()
    train(site.world, rank, range(11, 31))
    for tab, clock in zip(tabs[:-1], clocks, strict=False):
        tab.bring_to_front()
        clock.hears(30, "points", "row")
        clock.run()
        assert fact(tab, "Step") == "30"
        assert "step 30:" in label_of(tab)
    tabs[-1].bring_to_front()
    clocks[-1].hears(30, "rows")
    clocks[-1].run()
    assert tabs[-1].locator(".row .progress").inner_text().startswith("30")


def test_a_comparison_says_what_is_new_in_time(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site()
    ids = [submit(site.world, name, steps=1000) for name in ("one", "other")]
    ranks = [begin(site.world, job_id) for job_id in ids]
    for rank in ranks:
        train(site.world, rank, range(1, 11))
    clock = PageClock(page)
    ready(page, f"{site.url}/compare?jobs={','.join(ids)}")
    page.wait_for_selector("#connection[data-state=live]")
    clock.stop()
    for rank, last in zip(ranks, (30, 31), strict=True):
        train(site.world, rank, range(11, last + 1))
        clock.hears(last, "points")
    clock.run()
    losses, differences = [chart.get_attribute("aria-label") or "" for chart in page.locator("canvas").all()]
    assert ("At step 31" in losses, "At step 30" in differences) == (True, True)
    clock.go_on()


def serve(settings: Settings, database_url: str, port: int) -> None:
    """Serve in this process until it is killed."""
    from octet.service.app import create_app
    from octet.service.db.engine import Database
    from octet.service.processes.server import http_server
    from octet.service.processes.startup import listening

    settings = Settings(**{**settings.model_dump(), "port": port})
    with listening(settings) as (listener,):
        http_server(create_app(settings, database=Database(database_url)), settings).run(sockets=[listener])


class Lives:
    """A server that is killed and started again on the same port. Its process is forked from one that has all loaded."""

    def __init__(self, world: World) -> None:
        self._start = multiprocessing.get_context("forkserver")
        self._start.set_forkserver_preload(["octet.service.app", "octet.service.processes.startup", "alembic.command"])
        self._world = world
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def begin(self) -> None:
        database_url = f"sqlite:///{self._world.settings.data_dir.parent / 'octet.db'}"
        self._process = self._start.Process(target=serve, args=(self._world.settings, database_url, self.port), daemon=True)
        self._process.start()
        wait_until(self._answers)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def lives(world: World) -> Iterator[Lives]:
    server = Lives(world)
    server.begin()
    yield server
    server.kill()


def test_no_point_is_lost_or_doubled_when_the_server_is_killed(
    page: "Page", own_site: Callable[..., Site], errors: list[str]
) -> None:
    """The job trains on meanwhile, and once it goes back to a checkpoint. The chart is then read step by step by its keys."""
    world = own_site().world
    job_id = submit(world, "watched", steps=1000, max_failures=3)
    rank = begin(world, job_id)
    train(world, rank, range(1, 6))
    clock = PageClock(page)
    with lives(world) as server:
        ready(page, f"{server.url}/jobs/{job_id}?smooth=0")
        page.wait_for_selector("#connection[data-state=live]")
        last = 5
        for kill in range(NUM_KILLS):
            train(world, rank, range(last + 1, last + 3), seed=kill)
            server.kill()
            page.locator("#connection", has_text="connection lost").wait_for()
            if kill == NUM_KILLS // 2:
                end(rank, "failed", reason=FailureReason.WORKER_LOST, message="rank 0 was killed by signal 9")
                world.clock.turn(60)
                world.dispatch()
                world.clock.turn(60)
                rank = begin(world, job_id, resumed_from_step=last - 3)
                last -= 5
            train(world, rank, range(last + 3, last + 6), seed=100 + kill)
            last += 5
            clock.stop()
            server.begin()
            clock.hears(last, "points")
            clock.run()
            assert f"step {last}:" in label_of(page)
            clock.go_on()
            page.wait_for_selector("#connection[data-state=live]")
        points = httpx.get(f"{server.url}/v1/jobs/{job_id}/metrics").json()["data"]
        assert [point["step"] for point in points] == list(range(1, last + 1))
        steps, losses = zip(*walked(page, last), strict=True)
        assert list(steps) == [f"step {point['step']}" for point in points]
        # The page's numbers have six digits and show four decimals. Losses of other steps and attempts differ by more.
        assert [float(loss) for loss in losses] == pytest.approx([point["loss"] for point in points], abs=1.1e-4)
        assert fact(page, "Step") == str(last)
        page.goto("about:blank")
    errors.clear()  # the requests that met no server


def walked(page: "Page", num_steps: int) -> list[tuple[str, str]]:
    """Walk the loss chart's cursor from its first step to its last, and read the legend at each."""
    program = """async (count) => {
      const [canvas] = document.querySelectorAll("canvas");
      const frame = () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
      const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      const seen = [];
      for (let place = 0; place < count; place++) {
        press(place ? "ArrowRight" : "Home");
        await frame();
        const legend = canvas.parentElement.querySelector(".legend");
        seen.push([legend.querySelector(".where").textContent, legend.querySelector("b").textContent]);
      }
      return seen;
    }"""
    seen: list[tuple[str, str]] = page.evaluate(program, num_steps)
    return seen


def test_a_job_that_is_deleted_is_said_to_be_and_blocks_no_other_tab(
    context: "BrowserContext", own_site: Callable[..., Site]
) -> None:
    """All tabs share a stream, and the server refuses one that names a job that is not there."""
    site = own_site()
    gone, other = (submit(site.world, name, steps=100) for name in ("gone", "other"))
    site.world.cancel(gone)
    rank = begin(site.world, other)
    tabs = [ready(context.new_page(), f"{site.url}/jobs/{gone}")]
    tabs[0].wait_for_selector("#connection[data-state=live]")
    site.world.delete(gone)
    tabs[0].get_by_text("This job was deleted.").wait_for()
    tabs.append(ready(context.new_page(), f"{site.url}/jobs/{other}"))  # the stream is opened again
    train(site.world, rank, range(1, 11))
    tabs[1].bring_to_front()
    until(tabs[1], "document.querySelector('.facts strong').textContent === '10'")
    assert "This job was deleted." not in tabs[1].content()


def test_a_filtered_list_takes_a_job_that_begins_to_match(page: "Page", own_site: Callable[..., Site]) -> None:
    site = own_site()
    ready(page, f"{site.url}/?state=live")
    page.get_by_text("No job matches").wait_for()
    page.wait_for_selector("#connection[data-state=live]")
    begin(site.world, submit(site.world, "late"))
    page.locator(".row", has_text="late").wait_for()
    assert json.loads(page.evaluate("JSON.stringify([document.querySelectorAll('.row').length])")) == [1]


def test_the_header_says_that_nothing_is_new(page: "Page", own_site: Callable[..., Site], errors: list[str]) -> None:
    """The last values stay, greyed, while the server is away."""
    world = own_site().world
    job_id = submit(world, "watched")
    train(world, begin(world, job_id), range(1, 6))
    with lives(world) as server:
        ready(page, f"{server.url}/jobs/{job_id}")
        page.wait_for_selector("#connection[data-state=live]")
        server.kill()
        page.locator("#connection", has_text="connection lost").wait_for()
        assert fact(page, "Step") == "5"
        assert page.evaluate("document.documentElement.classList.contains('stale')")
        page.goto("about:blank")
        server.begin()
    errors.clear()

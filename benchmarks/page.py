"""Measure what the page costs: a browser's CPU among many jobs and at a long, live curve, the server's memory for many pages.

    python -m benchmarks.page --write

The server is that of `benchmarks.control_plane`, whose cluster is in memory; the browser is Debian's Chromium without a window.
CPU is that of the page's main thread (`TaskDuration` of Chromium's `Performance` domain in thread ticks), so it hardly
depends on what else the machine does. Reports go through the API as a rank's do.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.control_plane import Connection, Server, add_history, running, submission
from benchmarks.control_plane_reports import NUM_ATTEMPTS, SETTINGS, Rank, ranks_of
from benchmarks.figures import Figure, add_write_option, show
from octet.api_schemas import MAX_REPORTS_PER_BATCH

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NUM_JOBS, NUM_JUMPS = 10_000, 20
NUM_STEPS, STEPS_PER_S, NUM_SECONDS = 100_000, 20, 20
NUM_PAGES, REST_S = 20, 3.0
GOALS = {
    f"CPU of a jump among {NUM_JOBS:,} jobs, median (ms)": 60.0,
    f"CPU of a second at {STEPS_PER_S} steps/s of a job of {NUM_STEPS:,}, median (ms)": 40.0,
    f"server's memory for {NUM_PAGES} pages (MB)": 5.0,
}


@contextmanager
def chromium() -> "Iterator[Browser]":
    """Start Debian's Chromium. Raises SystemExit without it."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("there is no program chromium. Install it with `make page-tools`.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: "Browser", address: str) -> "Page":
    """Open an address in a profile of its own, and wait until the page is live."""
    page = browser.new_context(viewport={"width": 1360, "height": 900}).new_page()
    page.goto(address)
    page.wait_for_selector("main[aria-busy=false]")
    page.wait_for_selector("#connection[data-state=live]")
    return page


class MainThread:
    """The main thread of a page."""

    def __init__(self, page: "Page") -> None:
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def cpu_ms(self) -> float:
        """Return the milliseconds of CPU that it has taken so far."""
        metrics: list[dict[str, Any]] = self._session.send("Performance.getMetrics")["metrics"]
        return 1000 * next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")


def jumps_ms(browser: "Browser", server: Server) -> list[float]:
    """Jump to places all over the list of jobs, and return the CPU of each until its rows stand."""
    page = opened(browser, f"http://127.0.0.1:{server.port}/")
    thread, found = MainThread(page), []
    for number in range(NUM_JUMPS):
        place = (number * 7 % NUM_JUMPS + 0.5) / NUM_JUMPS
        before = thread.cpu_ms()
        page.evaluate(f"scrollTo(0, document.documentElement.scrollHeight * {place})")
        page.wait_for_timeout(500)
        page.locator(".row:not(.loading) .name a").first.wait_for()
        found.append(thread.cpu_ms() - before)
    page.context.close()
    return found


def step(number: int) -> str:
    """Make the report of a step, as JSON."""
    fields = {"loss": 2 + number % 7 / 100, "gradient_norm": 1.0, "learning_rate": 1e-3, "tokens": 2048}
    return json.dumps({"kind": "step", "step": number, **fields, "step_time_s": 1 / STEPS_PER_S, "data_wait_s": 0.0})


def report(rank: Rank, server: Server, first: int, last: int) -> None:
    """Report steps in as large requests as are allowed."""
    connection = Connection(server.port)
    for begin in range(first, last + 1, MAX_REPORTS_PER_BATCH):
        connection.ask(rank.request(*map(step, range(begin, min(begin + MAX_REPORTS_PER_BATCH, last + 1)))))
    connection.close()


def live_seconds_ms(browser: "Browser", server: Server, rank: Rank, job_id: str) -> list[float]:
    """Look at a job with a long curve while steps come, and return the CPU of each second."""
    report(rank, server, 1, NUM_STEPS)
    page = opened(browser, f"http://127.0.0.1:{server.port}/jobs/{job_id}")
    thread, found = MainThread(page), []
    began, before = time.monotonic(), thread.cpu_ms()
    for second in range(NUM_SECONDS):
        for tick in range(STEPS_PER_S):
            number = NUM_STEPS + second * STEPS_PER_S + tick + 1
            report(rank, server, number, number)
            page.wait_for_timeout(max(0.0, 1000 * (began + second + (tick + 1) / STEPS_PER_S - time.monotonic())))
        found.append(thread.cpu_ms() - before)
        before += found[-1]
    page.locator(f'canvas[aria-label*="step {NUM_STEPS + NUM_SECONDS * STEPS_PER_S:,}:"]').first.wait_for()
    page.context.close()
    return found


def pages_mb(browser: "Browser", server: Server) -> float:
    """Return the megabytes that the server's memory grows by for many pages, each of a browser's profile of its own."""
    address = f"http://127.0.0.1:{server.port}/"
    opened(browser, address).context.close()  # what the first page of all makes the server load
    time.sleep(REST_S)
    before = server.memory_mib()
    pages = [opened(browser, address) for _ in range(NUM_PAGES)]
    time.sleep(REST_S)
    grown = server.memory_mib() - before
    for page in pages:
        page.context.close()
    return grown * 2**20 / 1e6


def measure(folder: Path) -> dict[str, list[float]]:
    """Measure once. The keys are those of GOALS."""
    corpus = folder / "corpus.txt"
    corpus.write_text("text to train on\n" * 1000)
    with running(Path(), folder, slots=NUM_ATTEMPTS, settings=SETTINGS) as server, chromium() as browser:
        ranks, job_ids = ranks_of(server, corpus)
        memory = pages_mb(browser, server)
        live = live_seconds_ms(browser, server, ranks[0], job_ids[0])
        connection = Connection(server.port)
        connection.ask(submission(corpus), status=201)  # it waits for a slot, and is what the others are copies of
        connection.close()
        add_history(server.database, NUM_JOBS)
        return dict(zip(GOALS, (jumps_ms(browser, server), live, [memory]), strict=True))


def main() -> int:
    """Print the figures beside their goals."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_write_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    rows = []
    for name, values in found.items():
        spread = f"{min(values):.1f} to {max(values):.1f}" if len(values) > 1 else ""
        rows.append(Figure(f"page: {name}", f"{statistics.median(values):.1f}", spread, f"<= {GOALS[name]:g}"))
    show(rows, "benchmarks.page", options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

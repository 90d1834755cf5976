"""A real Chromium that looks at the page, served over a database with jobs of all kinds.

Each test fails on an error of the page's console, on a violation of its policy, and on a request to another host.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from octet.service.http.streams import LIST_POLL_S, POLL_S
from octet.service.settings import Settings
from tests.kit.waiting import LONG_S
from tests.page.stage import furnish, furnish_comparisons, stage
from tests.service.conftest import fast_dir
from tests.service.serving import serving
from tests.service.world import World

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

__all__ = ["fast_dir"]
TOOLS = Path(__file__).parents[2] / "build" / "page-tools"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")


def skip_or_fail(missing: str) -> None:
    """Say what is missing. CI has all of it."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"missing: {missing}")
    pytest.skip(f"missing: {missing}")


@pytest.fixture(scope="module")
def chromium() -> "Iterator[Browser]":
    """A browser for the tests of one file. Playwright's event loop runs while it is open, beside which asyncio.run raises."""
    program = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if program is None:
        skip_or_fail("Chromium; `make page-tools` installs Debian's")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        skip_or_fail("playwright, of the extra dev")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Site:
    """A served page: its address, the world behind it, its jobs by name."""

    url: str
    world: World
    jobs: dict[str, str] = field(default_factory=dict)

    def job(self, name: str) -> str:
        return f"{self.url}/jobs/{self.jobs[name]}"


@pytest.fixture(scope="session")
def furniture(fast_dir: Path) -> tuple[Path, dict[str, str]]:
    """A folder with a database of jobs, and their ids by name."""
    folder = fast_dir / "furniture"
    folder.mkdir()
    world = stage(folder)
    jobs = furnish(world)
    world.database.close()
    return folder, jobs


@pytest.fixture(scope="session")
def site(furniture: tuple[Path, dict[str, str]]) -> Iterator[Site]:
    """The page over these jobs, for tests that change nothing."""
    with served(furniture[0]) as found:
        yield Site(found.url, found.world, furniture[1])


@pytest.fixture(scope="session")
def compared_site(fast_dir: Path) -> Iterator[Site]:
    """The page over comparisons of all states, by name as `jobs`, for tests that change nothing."""
    folder = fast_dir / "comparisons"
    folder.mkdir()
    world = stage(folder)
    found = furnish_comparisons(world)
    world.database.close()
    with served(folder) as site:
        yield Site(site.url, site.world, found)


@pytest.fixture(scope="session")
def empty_site(fast_dir: Path, empty_database: Path) -> Iterator[Site]:
    """The page of a server without jobs, for tests that change nothing."""
    with served(copied(empty_database, fast_dir / "empty")) as found:
        yield found


@pytest.fixture(scope="session")
def empty_database(fast_dir: Path) -> Path:
    folder = fast_dir / "nothing"
    folder.mkdir()
    stage(folder).database.close()
    return folder


@pytest.fixture
def own_site(fast_dir: Path, empty_database: Path, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Serve an empty stage of the test's own, with changed settings such as API keys."""
    with ExitStack() as stack:
        folder = copied(empty_database, fast_dir / tmp_path.name)
        yield lambda **changes: stack.enter_context(served(folder, **changes))


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


@contextmanager
def served(folder: Path, **changes: Any) -> Iterator[Site]:
    """Serve the stage in a folder."""
    world = stage(folder, begin=datetime.now(UTC))
    world.settings = Settings(**{**world.settings.model_dump(), **changes})
    with serving(world.settings, world.database) as (server, port):
        yield Site(f"http://127.0.0.1:{port}", world)
        server.force_exit = True  # a browser that is being closed may still hold a stream


@pytest.fixture
def errors() -> list[str]:
    """Collect the errors of the browser. A test that provokes an error empties it."""
    return []


@pytest.fixture
def context(chromium: "Browser", errors: list[str]) -> "Iterator[BrowserContext]":
    """A browser profile of its own, which reaches nothing but this machine."""
    made = chromium.new_context(viewport={"width": 1360, "height": 900}, locale="en-US")

    def only_here(route: Any) -> None:
        if route.request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            route.fallback()
        else:
            errors.append(f"asked for {route.request.url}")
            route.abort()

    made.route("**/*", only_here)

    def said(message: Any) -> None:
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            errors.append(message.text)

    def answered(answer: Any) -> None:
        if answer.status >= 400 and "/v1/" not in answer.url and "/readyz" not in answer.url:
            errors.append(f"{answer.status} for {answer.url}")

    made.on("console", said)
    made.on("response", answered)
    made.on("weberror", lambda error: errors.append(str(error.error)))
    made.set_default_timeout(1000 * LONG_S)
    yield made
    made.close()
    assert errors == []


@pytest.fixture
def page(context: "BrowserContext") -> "Page":
    return context.new_page()


def ready(page: "Page", url: str) -> "Page":
    """Go to an address, and wait until its view stands."""
    page.goto(url)
    page.wait_for_selector("main[aria-busy=false]")
    return page


def until(page: "Page", expression: str) -> None:
    """Wait until an expression of JavaScript is true. Playwright's own wait would need `unsafe-eval` of the policy."""
    deadline = time.monotonic() + LONG_S
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


def drawn(page: "Page") -> None:
    """Let the page draw what has changed: a chart draws in the next frame."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


IN_TIME_MS = 2000
PAGE_MS = IN_TIME_MS - round(1000 * (LIST_POLL_S + POLL_S))
"""The time that a page has, after the service has looked for what is new. The worker between them hands on at once."""
HEARD = """
window.octetHeard = [];
window.SharedWorker = class extends SharedWorker {
  constructor(...given) {
    super(...given);
    this.port.addEventListener("message", ({data}) => octetHeard.push(...data));
  }
};
"""


class PageClock:
    """The clock of a page. It can stand, so that the machine's load has no part in what the page shows in time."""

    def __init__(self, page: "Page") -> None:
        """Take the clock of a page that has not been opened yet, and keep what the worker sends to it."""
        self._page = page
        page.add_init_script(HEARD)
        page.clock.install()

    def stop(self) -> None:
        """Let the clock stand, and forget what was heard."""
        self._page.evaluate("octetHeard.length = 0")
        # Later than the page's present, which goes on meanwhile: the clock does not go back.
        self._page.clock.pause_at(self._page.evaluate("Date.now()") / 1000 + LONG_S)

    def hears(self, step: int, *kinds: str) -> None:
        """Wait until messages of these kinds (points, row, rows) with a step have come to the page since the clock stands."""
        has_step = f"[data, changed].flat().some((each) => [each?.step].flat().includes({step}))"
        for kind in kinds:
            until(self._page, f"octetHeard.some(({{kind, data, changed}}) => kind === '{kind}' && {has_step})")

    def run(self) -> None:
        """Let the rest of the two seconds pass."""
        self._page.clock.run_for(PAGE_MS)

    def go_on(self) -> None:
        self._page.clock.resume()


def label_of(page: "Page") -> str:
    """Return the label of the first chart."""
    return page.locator("canvas").first.get_attribute("aria-label") or ""

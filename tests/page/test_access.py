"""axe finds no violation on any page: empty, failing and full, light and dark, wide and narrow."""

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.page.conftest import TOOLS, Site, skip_or_fail

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.system
AXE = TOOLS / "node_modules" / "axe-core" / "axe.min.js"
WIDTHS = (1360, 390)
THEMES = ("light", "dark")
RUN = """async () => {
  const {violations} = await axe.run(document, {resultTypes: ["violations"]});
  const words = ({html, any, all, none}) => `${html.slice(0, 200)} ${[...any, ...all, ...none].map(({message}) => message)}`;
  return violations.flatMap(({id, nodes}) => nodes.map((node) => `${id}: ${words(node)}`));
}"""


@pytest.fixture
def axe() -> str:
    if not AXE.is_file():
        skip_or_fail("axe-core; `make page-tools` installs it")
    return AXE.read_text()


@pytest.mark.parametrize("state", ["empty", "error", "full"])
@pytest.mark.parametrize("view", ["jobs", "job", "compare", "comparisons", "comparison", "submit", "cluster"])
def test_axe_has_nothing_to_say(
    page: "Page", site: Site, empty_site: Site, compared_site: Site, axe: str, view: str, state: str
) -> None:
    if state == "error":
        page.route(re.compile(r"/v1/|/readyz"), refuse)
    page.goto(address(view, state, compared_site if view.startswith("comparison") else site, empty_site))
    page.wait_for_selector("main[aria-busy=false]")
    page.locator("[role=alert]" if state == "error" else "#theme[aria-label]").first.wait_for()
    if state == "full" and view in {"jobs", "job", "compare", "comparison", "cluster"}:
        page.wait_for_selector("#connection[data-state=live]")
    if state == "full" and view == "submit":
        page.wait_for_selector("[aria-label='Plan by level']")
    page.evaluate(axe)
    found = []
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            found += [f"{theme} {width}: {each}" for each in page.evaluate(RUN)]
    assert found == []


def refuse(route: Any) -> None:
    route.fulfill(status=503, json={"title": "Not ready", "detail": "the database does not answer; try again"})


def address(view: str, state: str, site: Site, empty_site: Site) -> str:
    """The empty job is one that waits, the empty comparisons are one of nothing and one without jobs."""
    jobs, is_empty = site.jobs, state == "empty"
    paths = {
        "jobs": lambda: "/",
        "job": lambda: f"/jobs/{jobs['queued-0'] if is_empty else jobs['running']}",
        "compare": lambda: "/compare" if is_empty else f"/compare?jobs={jobs['gpt-tiny-fp32']},{jobs['gpt-tiny-O2']}",
        "comparisons": lambda: f"/compare?after={jobs['finished']}" if is_empty else "/compare",
        "comparison": lambda: f"/comparisons/{jobs['paused'] if is_empty else jobs['sweep']}",
        "submit": lambda: "/submit?levels=fp32,O2" if state == "full" else "/submit",
        "cluster": lambda: "/cluster",
    }
    server = empty_site if is_empty and view in {"jobs", "compare", "submit", "cluster"} else site
    return f"{server.url}{paths[view]()}"

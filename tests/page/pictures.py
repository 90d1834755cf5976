"""Draw the page from a live run into docs/page: `make pictures`, or `python -m tests.page.pictures`.

A real `octet serve` trains the same small GPT at five levels on this machine's processors, over the sources of its Python,
and one job that fails. Nothing is made up: what the pictures show, these jobs measured.
"""

import argparse
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octet.api_schemas import JobSpec, JobState
from tests.e2e.octet_server import Server
from tests.kit.waiting import LONG_S, WHOLE_RUN_S, wait_until
from tests.page.conftest import CHROMIUMS

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FOLDER = Path(__file__).parents[2] / "docs" / "page"
LEVELS = ("fp32", "bf16-amp", "te", "O2", "O3")
MODEL = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 256, "max_sequence_length": 128}
WIDE, NARROW = (1360, 900), (390, 844)


def spec(name: str, level: str, corpus: Path, **training: Any) -> JobSpec:
    """A GPT of 0.45 million parameters that learns Python's sources byte by byte."""
    given = {
        "steps": 80, "global_batch_size": 4, "sequence_length": 128, "optimizer": {"learning_rate": 3e-3},
        "schedule": {"warmup_steps": 10}, "eval_every": 16, "eval_batches": 2, "checkpoint_every": 40,
    }  # fmt: skip
    precision = {"level": level, **({"statistics_every": 16} if level[0] == "O" else {})}
    return JobSpec.model_validate(
        {"name": name, "model": MODEL, "precision": precision, "data": {"path": str(corpus)}, "training": given | training}
    )


def run_jobs(server: Server, corpus: Path) -> dict[str, str]:
    """Run the jobs; the last two are left to run and to wait. Returns ids by name."""
    client = server.client
    jobs = {level: client.submit(spec(f"gpt-{level}", level, corpus)).id for level in LEVELS}
    hot = {"optimizer": {"learning_rate": 10.0}, "schedule": {}, "gradient_clip": None, "steps": 48}
    jobs["hot"] = client.submit(spec("gpt-too-hot", "O2", corpus, **hot)).id
    wait_until(lambda: all(client.job(each).state.is_terminal for each in jobs.values()), timeout_s=WHOLE_RUN_S, poll_s=1)
    jobs["live"] = client.submit(spec("gpt-on-python", "O2", corpus, steps=4000)).id
    jobs["beside"] = client.submit(spec("gpt-on-python-8bit", "O2-8bit", corpus, steps=4000)).id
    jobs["waiting"] = client.submit(spec("gpt-on-python-split", "O3-split", corpus, steps=4000)).id
    wait_until(
        lambda: (seen := client.job(jobs["live"]).progress) is not None and seen.step >= 100, timeout_s=WHOLE_RUN_S, poll_s=1
    )
    assert client.job(jobs["waiting"]).state is JobState.QUEUED
    return jobs


@contextmanager
def opened() -> "Iterator[Browser]":
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, CHROMIUMS)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def shoot(url: str, jobs: dict[str, str], folder: Path) -> None:
    """Take each picture when its view is live."""
    compared = ",".join(jobs[level] for level in LEVELS)
    views = {
        "jobs": "/", "job": f"/jobs/{jobs['live']}", "failed": f"/jobs/{jobs['hot']}",
        "compare": f"/compare?jobs={compared}", "submit": f"/submit?from={jobs['live']}", "cluster": "/cluster",
    }  # fmt: skip
    live = [
        ("jobs", "light", WIDE),
        ("job", "light", WIDE),
        ("jobs", "dark", WIDE),
        ("job", "dark", WIDE),
        ("cluster", "light", WIDE),
    ]
    narrow = [("jobs", "light", NARROW), ("job", "light", NARROW)]
    pictures = [*live, *narrow, *[(name, "light", WIDE) for name in ("failed", "compare", "submit")]]
    folder.mkdir(parents=True, exist_ok=True)
    with opened() as browser:
        for name, theme, (width, height) in pictures:
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme, device_scale_factor=1)  # type: ignore[arg-type]
            page.set_default_timeout(1000 * LONG_S)
            page.goto(f"{url}{views[name]}")
            page.wait_for_selector("main[aria-busy=false]")
            if name != "submit":
                page.wait_for_selector("#connection[data-state=live]")
            else:
                page.get_by_text("It can run").wait_for()
                page.wait_for_selector("[aria-label='Plan by level']")
            page.wait_for_timeout(1500)  # two redraws
            of_kind = "".join([f"-{theme}" if theme == "dark" else "", "-narrow" if width == NARROW[0] else ""])
            page.screenshot(path=folder / f"{name}{of_kind}.png", full_page=name == "compare")
            page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    folder = parser.parse_args().out
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch, "corpus")
        shutil.copytree(Path(sysconfig.get_path("stdlib"), "asyncio"), corpus, ignore=shutil.ignore_patterns("__pycache__"))
        server = Server(Path(scratch, "data"))
        server.start()
        try:
            jobs = run_jobs(server, corpus)
            shoot(f"http://127.0.0.1:{server.port}", jobs, folder)
            for name in ("live", "beside", "waiting"):
                server.client.cancel(jobs[name])
        finally:
            server.stop()


if __name__ == "__main__":
    main()

"""The site builds without a dead link, has every page and every public name, and loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import octet
from docs.site import prepare
from tests.docs.blocks import ROOT
from tests.kit.waiting import LONG_S

CONFIG = ROOT / "docs/site/mkdocs.yml"


def entries(part: Any) -> list[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(part, str):
        return [part]
    return [page for child in (part.values() if isinstance(part, Mapping) else part) for page in entries(child)]


def test_every_page_is_in_the_navigation_once() -> None:
    pages = entries(yaml.safe_load(CONFIG.read_text())["nav"])
    assert sorted(pages) == sorted([*prepare.PAGES.values(), "reference/library.md", "reference/job.md", "reference/api.md"])


def test_every_public_name_is_in_the_reference() -> None:
    assert sorted(name for names in prepare.LIBRARY.values() for name in names) == sorted(octet.__all__)


def test_a_link_to_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"docs/index\.md links to gone\.md, and docs/gone\.md does not exist"):
        prepare.with_links_of_the_site("See [this](gone.md).", "docs/index.md", "index.md", tmp_path)


@pytest.mark.parametrize(
    ("link", "on_the_site"),
    [
        ("recipes.md#several-ranks", "recipes.md#several-ranks"),
        ("../README.md", "readme.md"),
        ("../benchmarks/RESULTS.md", "results.md"),
        ("../service/jobs/lifecycle.py", "files/service/jobs/lifecycle.py.txt"),
        ("dashboards/octet-job.png", "files/docs/dashboards/octet-job.png"),
        ("#here", "#here"),
    ],
)
def test_links_that_leave_the_folder_stay_on_the_site(tmp_path: Path, link: str, on_the_site: str) -> None:
    text = f"[x]({link})\n```sh\n[x]({link})\n```\n"
    expected = f"[x]({on_the_site})\n```sh\n[x]({link})\n```\n"
    assert prepare.with_links_of_the_site(text, "docs/index.md", "index.md", tmp_path) == expected
    assert not on_the_site.startswith("files/") or (tmp_path / on_the_site).is_file()


@pytest.mark.system
def test_the_site_builds_and_needs_no_other(tmp_path: Path) -> None:
    pages, site = tmp_path / "pages", tmp_path / "site"
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {CONFIG}\ndocs_dir: {pages}\nsite_dir: {site}\n")
    run("docs.site.prepare", str(pages))
    run("mkdocs", "build", "--quiet", "--strict", "--config-file", str(config))
    library = (site / "reference/library.html").read_text()
    assert all(f'id="octet.{name}"' in library for name in octet.__all__)
    assert "micro_batch_size" in (site / "reference/job.html").read_text()
    assert "/v1/jobs/{job_id}/cancel" in (site / "reference/api.html").read_text()
    loaded = {
        url
        for page in site.rglob("*.html")
        for url in re.findall(r'<(?!a\b)[^>]*?\b(?:src|href)="(https?://[^"]+)"', page.read_text())  # a link is not loaded
        if not url.startswith("http://127.0.0.1")
    }
    assert loaded == set()


def run(*module: str) -> None:
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *module]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LONG_S)
    assert answer.returncode == 0, answer.stdout + answer.stderr

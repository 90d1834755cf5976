"""One live run for all tests that query Prometheus, and the programs that they need."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.observability.live import Live, Missing, running


@pytest.fixture(scope="session")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        _skip("missing: promtool. Install Debian's package `prometheus`, or run `make prometheus` as root.")
    return found


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts") / "corpus"
    folder.mkdir()
    for number in range(4):
        lines = "\n".join(f"line {line} of file {number}: the quick brown fox" for line in range(400))
        (folder / f"part_{number}.txt").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Live]:
    try:
        with running(tmp_path_factory.mktemp("live"), corpus) as live:
            yield live
    except Missing as missing:
        _skip(str(missing))


def _skip(why: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)

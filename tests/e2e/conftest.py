"""Servers for the end-to-end tests: one that all tests share, and one that a test may kill."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.octet_server import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests of a module that do not kill it. It was started with umask 0."""
    yield from served(Server(tmp_path_factory.mktemp("open") / "octet", counts_validations=True, umask=0))


@pytest.fixture(scope="module")
def mortal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that each test of a module may kill, and brings back. Ray takes ten seconds to start."""
    yield from served(Server(tmp_path_factory.mktemp("mortal")))


def served(served: Server) -> Iterator[Server]:
    served.start()
    try:
        yield served
    finally:
        served.stop()
        left = [" ".join(process.cmdline())[:80] for process in served.processes()]
        assert left == []


@pytest.fixture
def long_job(spec_document: dict[str, Any]) -> dict[str, Any]:
    """A job of some seconds: long enough to kill things in the middle."""
    training = {"steps": 600, "global_batch_size": 8, "sequence_length": 64, "checkpoint_every": 40, "eval_every": 120}
    return spec_document | {"name": "long", "training": spec_document["training"] | training}

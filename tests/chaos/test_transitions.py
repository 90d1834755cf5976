"""Random lives by a plain generator: few in `make test`, 10⁵ transitions in the matrix, 10⁶ by `make chaos`."""

import os
from collections.abc import Iterator

import pytest
from sqlalchemy import update

from service.db.engine import Database
from service.db.tables import JobRow
from tests.chaos.transitions import LIFE, RULES, LifeBroken, live, live_in_processes, live_on, sqlite_url
from tests.service.test_stateful import ControlPlane


@pytest.fixture
def url() -> Iterator[str]:
    with sqlite_url() as url:
        database = Database(url)
        database.migrate()
        database.close()
        yield url


def test_random_lives_break_no_invariant(url: str) -> None:
    counts = live_on(url, 11, 3 * LIFE)
    assert counts.total() == 3 * LIFE
    assert counts.keys() == RULES.keys()


@pytest.mark.matrix
@pytest.mark.timeout(7200)
def test_many_random_lives_break_no_invariant() -> None:
    counts = live_in_processes("sqlite", 11, 100_000, os.cpu_count() or 1)
    assert counts.total() == 100_000
    assert counts.keys() == RULES.keys()


def test_the_rules_are_those_that_hypothesis_draws() -> None:
    assert RULES.keys() == {rule.function.__name__ for rule in ControlPlane.setup_state().rules}


def test_a_life_that_breaks_names_its_seed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One event is skipped; the invariants notice, and the message says how to live that life again."""

    def skip_an_event(machine: ControlPlane, seconds: float) -> None:
        with machine.world.database.write() as session:
            session.execute(update(JobRow).values(last_event_seq=JobRow.last_event_seq + 1))

    monkeypatch.setattr(ControlPlane, "time_passes", skip_an_event)
    with pytest.raises(LifeBroken, match=r"the life of seed 12 broke after \d+ transitions, at last \[.*'time_passes'\]"):
        live(url, 12)

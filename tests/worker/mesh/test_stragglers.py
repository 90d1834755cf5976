"""A rank that computes longer than the others is named, once, from the times that real ranks (gloo) write."""

import json
import time
from pathlib import Path

import pytest
import torch

from octet.worker.common.config import RankEnv
from octet.worker.mesh import Mesh, Waits
from octet.worker.mesh.stragglers import Straggler, Stragglers, find
from octet.worker.metrics.readback import Mark
from octet.worker.metrics.table import Metrics
from octet.worker.train.log import StepLog, TakenStep, now
from octet.worker.train.reports import straggler_event
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks

BUSY_S = (1.0, 1.75)
"""By rank."""
LONG_S = 60.0


def tell_times(rank: int, port: int, folder: str) -> None:
    """Add this rank's time again and again until the first rank has named somebody."""
    torch.set_num_threads(1)
    named, until = None, time.monotonic() + LONG_S
    with Mesh(RankEnv(rank, 2, master_port=port), torch.device("cpu")) as mesh:
        assert mesh._agreement is not None
        mesh._agreement.stragglers._next_at_s = 0.0
        mesh._agreement.stragglers._period_s = 0.1
        while mesh.world.sum(float(named is not None))[0] == 0 and time.monotonic() < until:
            mesh.waits.add_busy(BUSY_S[rank])
            named = mesh.new_straggler()
    if named is not None:
        Path(folder, f"{rank}.json").write_text(straggler_event(named).model_dump_json())


def test_the_first_rank_names_the_slow_one(tmp_path: Path) -> None:
    run_ranks(tell_times, (free_port(), str(tmp_path)), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"], "the first rank reports for all"
    event = json.loads((tmp_path / "0.json").read_text())
    assert event["type"] == "rank.straggler"
    assert event["data"]["rank"] == 1
    assert event["data"]["busy_s"] == pytest.approx(1.75)
    assert event["data"]["median_s"] == pytest.approx(1.0)
    message = "rank 1 holds the others up: it computes 1.75 s in a step, and the median of the other ranks 1 s"
    assert event["message"] == message


def test_the_time_that_a_rank_computes_is_its_step_without_its_waits() -> None:
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        log, waits = StepLog(mesh, is_late=False), mesh.waits
        marks = []
        for _ in range(6):
            marks.append(Mark(mesh.device))
            time.sleep(0.002)
        waits.add_span(marks[0], marks[1])  # before the step
        waits.add_span(marks[3], marks[4])
        log.add(TakenStep(1, 0.1, 0.0, marks[2], marks[5], now()), torch.tensor(1.0), torch.tensor(1.0))
        log.end_interval(None)
        in_step_s, waited_s = marks[2].seconds_until(marks[5]), marks[3].seconds_until(marks[4])
        assert waits.last_busy_s == pytest.approx(in_step_s - waited_s)
        assert waits.take_mean_busy() == waits.last_busy_s
        assert waits.take_mean_busy() is None


def test_a_collective_is_a_wait_of_the_training_thread_while_it_blocks() -> None:
    waits = Waits(torch.device("cpu"))
    call = waits.call("sum", "world", 2048)
    assert str(call) == "sum of 2,048 bytes over world (number 1 there)"
    with call:
        assert waits.current is call
    assert waits.current is None
    assert len(waits.take_spans()) == 1
    assert waits.take_spans() == []


def test_only_one_that_stands_out_is_a_straggler() -> None:
    assert find([1.0, 1.1, 1.6, 1.2]) == Straggler(2, 1.6, 1.1)
    assert find([1.0, 1.1, 1.3, 1.2]) is None
    assert find([1.0, 1.31]) == Straggler(1, 1.31, 1.0)


def test_a_straggler_is_named_after_two_periods_and_again_when_it_returns() -> None:
    stragglers = Stragglers(None, 0, 3, Waits())
    named = []
    for slow in (2.0, 1.0, 2.0, 2.0, 2.0, 1.0, 2.0, 2.0):
        stragglers.compare([1.0, slow, 1.0])
        named.append(stragglers.take())
    assert [index for index, straggler in enumerate(named) if straggler] == [3, 7]


def test_a_rank_exports_its_own_time_once_it_has_one() -> None:
    metrics = Metrics()
    metrics.observe_busy(0.0)
    assert not metrics.knows("octet_train_busy_seconds")
    metrics.observe_busy(0.25)
    assert [(family.name, value) for family, _, value in metrics.read()] == [("octet_train_busy_seconds", 0.25)]

"""The thread that reads ahead: how far, how often it is woken, in which order, and how it ends."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from octet.api_schemas import BatchDivision
from octet.worker.data.order import EpochOrder
from octet.worker.data.prefetch import NUM_AHEAD, NUM_AT_ONCE, Prefetcher
from octet.worker.data.source import Batch
from tests.kit.waiting import wait_until


class Counted:
    """A source whose batches are their positions. It raises at `broken_at`."""

    facts: dict[str, float] = {}  # noqa: RUF012
    num_train_samples = 1000

    def __init__(self, broken_at: int | None = None) -> None:
        self.broken_at, self.read = broken_at, list[int]()

    def train_batch(self, position: int, batch_size: int) -> Batch:
        if position == self.broken_at:
            raise OSError("the disk is gone")
        self.read.append(position)
        return {"position": torch.tensor([position] * batch_size)}

    def evaluation_batches(self, *_arguments: Any) -> Iterator[Batch]:
        return iter(())


def reading(source: Counted) -> Prefetcher:
    return Prefetcher(source, BatchDivision(global_batch_size=4, micro_batch_size=2, num_data_ranks=1), 0, torch.device("cpu"))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "octet-data"]


def test_it_reads_ahead_by_several_and_no_further() -> None:
    batches = reading(source := Counted())
    taken = [(4 * step, index) for step in range(NUM_AHEAD) for index in range(2)]
    for number, place in enumerate(taken, 1):
        assert batches.take(*place)["position"].tolist() == [place[0] + 2 * place[1]] * 2
        expected = NUM_AHEAD + number // NUM_AT_ONCE * NUM_AT_ONCE
        wait_until(lambda expected=expected: len(source.read) == expected)
    assert source.read == sorted(source.read)
    batches.close()
    assert len(source.read) <= len(taken) + NUM_AHEAD + 1
    assert threads() == []


def test_another_place_starts_anew_and_an_error_comes_where_it_was_met() -> None:
    batches = reading(Counted(broken_at=6))
    assert batches.take(0, 0)["position"].tolist() == [0, 0]
    assert batches.take(4, 0)["position"].tolist() == [4, 4]
    with pytest.raises(OSError, match="the disk is gone"):
        batches.take(4, 1)
    batches.close()
    assert threads() == []


def test_samples_that_are_taken_together_are_those_taken_one_by_one() -> None:
    order = EpochOrder(7, seed=3)
    for position in range(20):
        for num_samples in (1, 3, 7, 16):
            expected = [order[position + offset] for offset in range(num_samples)]
            assert order.take(position, num_samples).tolist() == expected

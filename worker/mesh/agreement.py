"""The ranks agree on why they fail, and find the rank that hangs. Each has a thread for it, which talks through the store.

A rank with an error, or one that has waited in a collective for longer than the timeout, asks. Every rank's thread then says
what `verdict.Statement` has: its error if it has one, else where it is, with its Python stack. The first rank that asked
decides from what the others said, and writes the verdict, which all read. A rank that says nothing in time is named.
The first rank holds the store (torchrun's agent does under torchrun): ranks that cannot reach it name that.
"""

import json
import logging
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from octet.api_schemas import FailureReason
from octet.worker.common.errors import CollectiveFailed, RankError, RanksFailed, message_of, reason_of
from octet.worker.mesh.recorder import read_unended
from octet.worker.mesh.stragglers import Stragglers
from octet.worker.mesh.verdict import Statement, Verdict, decide
from octet.worker.mesh.waits import Waits

GRACE_S = 3.0
"""For the others to speak. The supervisor ends all ranks five seconds after it has seen the first one dead."""
_CAUSE_GRACE_S = 2.0
_ANSWER_DELAY_S = 1.0
"""A rank that is asked while it computes may be about to raise the same error itself."""
_LOST_S = 5.0
_STACK_FRAMES, _STACK_CHARACTERS, _MESSAGE_CHARACTERS = 8, 3000, 8000
_ASKED, _VERDICT, _NUM_DECIDING, _NUM_INFORMED = "octet/asked", "octet/verdict", "octet/deciding", "octet/informed"
_AGENT_IS_GONE = "the store of the ranks does not answer: torchrun's agent holds it"

logger = logging.getLogger(__name__)


def longest_s(num_ranks: int) -> float:
    """Seconds from the moment when a rank asks until all ranks know the verdict, if the store answers."""
    return GRACE_S + _ANSWER_DELAY_S + 2 + 4 * _poll_s(num_ranks)


def _poll_s(num_ranks: int) -> float:
    """Seconds between two looks at the store: at most a thousand questions a second reach it."""
    return max(0.25, num_ranks / 1024)


class Agreement:
    """One rank's part. It exists as long as the process groups do."""

    def __init__(self, store: Any, rank: int, num_ranks: int, waits: Waits, timeout_s: float, *, holds_store: bool) -> None:
        """store: a `torch.distributed.Store`. waits: what this rank's training thread waits for, made in that thread.

        timeout_s: the longest wait in a collective. holds_store: the first rank's process holds the store.
        """
        self._store, self._rank, self._num_ranks = store.clone(), rank, num_ranks
        self._waits, self._timeout_s, self._holds_store = waits, timeout_s, holds_store
        self._poll_s = _poll_s(num_ranks)
        self.stragglers = Stragglers(self._store, rank, num_ranks, waits)
        self._watched = threading.get_ident()
        self._own: Statement | None = None
        self._verdict: Verdict | None = None
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="octet-agreement", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, when this rank stops without an error."""
        self._closing.set()
        self._wake.set()
        self._thread.join(_LOST_S)

    def settle(self, error: Exception) -> RanksFailed:
        """Tell the others of this rank's error. Returns what all ranks agreed on, after some seconds at most."""
        if not isinstance(error, RankError):
            logger.error("this rank failed", exc_info=error)
        elif isinstance(error, CollectiveFailed):
            logger.warning("%s", error)
        is_cause = not isinstance(error, CollectiveFailed)
        self._own = self._statement(reason_of(error), message_of(error)[:_MESSAGE_CHARACTERS], is_cause=is_cause)
        self._wake.set()
        self._thread.join(longest_s(self._num_ranks) + 2 * _LOST_S)
        if self._verdict is not None:
            return RanksFailed(*self._verdict)
        if is_cause:
            return RanksFailed(reason_of(error), f"rank {self._rank} of {self._num_ranks}: {message_of(error)}")
        first = f"rank 0 of {self._num_ranks} ended without a word, or does not answer: it holds the store of the ranks"
        return RanksFailed(FailureReason.WORKER_LOST, first if self._holds_store else _AGENT_IS_GONE)

    def _run(self) -> None:
        try:
            while not self._closing.is_set() and self._verdict is None:
                self._wake.wait(self._poll_s)
                self._wake.clear()
                if self._closing.is_set():
                    return
                self._look()
                self.stragglers.look()
        except RuntimeError as error:  # torch's errors of stores
            if not self._closing.is_set():
                logger.debug("the store of the ranks is gone: %s", error)

    def _look(self) -> None:
        """Ask if this rank has a reason to; say what it can if somebody has asked, and wait for the verdict."""
        wait = self._waits.current
        hangs = wait is not None and time.monotonic() - wait.since_s > self._timeout_s
        if self._own is not None or hangs:
            self._store.set(_ASKED, b"1")
        elif not self._store.check([_ASKED]):
            return
        self._say()
        decides = self._store.add(_NUM_DECIDING, 1) == 1
        if decides or not self._is_decided():
            self._decide()
        reason, message, num_spoken = json.loads(self._store.get(_VERDICT))
        self._verdict = Verdict(FailureReason(reason), message)
        self._inform(num_spoken)

    def _say(self) -> None:
        """Say what is known of this rank. While it computes it may still run into an error or a collective: wait a little."""
        until = time.monotonic() + _ANSWER_DELAY_S
        while self._own is None and self._waits.current is None and time.monotonic() < until:
            time.sleep(0.02)
        said = self._own or self._statement()
        self._store.set(f"octet/said/{self._rank}", said.to_json())

    def _decide(self) -> None:
        """Gather what the others say, in the order in which they do, and write the verdict."""
        said: dict[int, Statement] = {}
        began = time.monotonic()
        while len(said) < self._num_ranks:
            for rank in range(self._num_ranks):
                if rank not in said and self._store.check([f"octet/said/{rank}"]):
                    said[rank] = Statement.from_json(self._store.get(f"octet/said/{rank}"))
            has_cause = any(statement.is_cause for statement in said.values())
            if time.monotonic() - began > max(_CAUSE_GRACE_S if has_cause else GRACE_S, 2 * self._poll_s):
                break
            time.sleep(0.02)
        verdict = decide(said, self._num_ranks)
        logger.error("%s", verdict.message)
        if verdict.reason is FailureReason.STALLED:
            for rank, statement in sorted(said.items()):
                logger.error("stack of rank %d:\n%s", rank, statement.stack)
        self._store.compare_set(_VERDICT, "", json.dumps([verdict.reason, verdict.message, len(said)]))

    def _is_decided(self) -> bool:
        """Wait for the verdict of the rank that decides. False if it does not come: that rank is gone too."""
        try:
            self._store.wait([_VERDICT], timedelta(seconds=longest_s(self._num_ranks)))
        except dist.DistStoreError:
            return False
        return True

    def _inform(self, num_spoken: int) -> None:
        """Count the ranks that know the verdict. The one that holds the store stays until all do that spoke, or seem gone."""
        num_informed = self._store.add(_NUM_INFORMED, 1)
        until = time.monotonic() + _CAUSE_GRACE_S
        while self._rank == 0 and self._holds_store and num_informed < num_spoken and time.monotonic() < until:
            time.sleep(0.02)
            num_informed = self._store.add(_NUM_INFORMED, 0)

    def _statement(self, reason: str = "", message: str = "", *, is_cause: bool = False) -> Statement:
        waits = self._waits
        wait, started = waits.current or waits.failed, dict(waits.num_started)
        waits_for, waits_s = ("", 0.0) if wait is None else (str(wait), time.monotonic() - wait.since_s)
        return Statement(
            reason,
            message,
            is_cause,
            waits.step,
            waits_for,
            waits_s,
            started,
            _stack_of(self._watched),
            waits.num_blocks,
            tuple(waits.last_blocks),
            () if is_cause else read_unended(),
        )


def _stack_of(thread: int) -> str:
    """The newest frames of a thread's Python code, as tracebacks show them."""
    frame = sys._current_frames().get(thread)
    lines = traceback.format_stack(frame)[-_STACK_FRAMES:] if frame is not None else []
    return "".join(lines)[-_STACK_CHARACTERS:]

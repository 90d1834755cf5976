"""Trace jobs on request: `python -m octet.worker.planning` reads one JSON line for each and answers one.

Everything is loaded once; each trace runs in a forked child with limits of time and memory, so that nothing it does stays. The
parent never runs a backward pass, since autograd does not survive a fork. It ends when its input does.
"""

import gc
import os
import resource
import selectors
import signal
import sys
from collections import deque
from typing import NoReturn

from octet.api_schemas.plan import TraceReply, TraceRequest
from octet.worker.planning.fake_gpu import device
from octet.worker.planning.moments import peak_of
from octet.worker.planning.trace import NotTraced

CPU_S = 60
DEADLINE_S = 300
MEMORY_BYTES = 4 << 30
MOST_CHILDREN = 4


class Planner:
    """The requests that wait, and the children that run."""

    def __init__(self) -> None:
        self.selector = selectors.PollSelector()  # which takes a file as input, too
        self.waiting: deque[TraceRequest] = deque()
        self.children: dict[int, tuple[int, str]] = {}
        """By the descriptor of a child: its process id, and the id of its request."""
        self._unread = b""

    def run(self) -> None:
        """Answer until the input ends and every child has."""
        stdin = sys.stdin.fileno()
        self.selector.register(stdin, selectors.EVENT_READ)
        while self.selector.get_map():
            for key, _ in self.selector.select():
                if key.fd == stdin:
                    self._read(stdin)
                else:
                    self._reap(key.fd)
            while self.waiting and len(self.children) < min(os.cpu_count() or 1, MOST_CHILDREN):
                self._start(self.waiting.popleft())

    def _read(self, stdin: int) -> None:
        chunk = os.read(stdin, 1 << 16)
        if not chunk:
            self.selector.unregister(stdin)
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        self.waiting += [TraceRequest.model_validate_json(line) for line in lines if line.strip()]

    def _start(self, request: TraceRequest) -> None:
        child = os.fork()
        if not child:
            _answer(request)
        descriptor = os.pidfd_open(child)
        self.children[descriptor] = child, request.id
        self.selector.register(descriptor, selectors.EVENT_READ)

    def _reap(self, descriptor: int) -> None:
        child, request_id = self.children.pop(descriptor)
        self.selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(child, 0)
        if status:
            limits = f"{CPU_S} s of CPU, {DEADLINE_S} s, {MEMORY_BYTES >> 30} GiB"
            _write(TraceReply(id=request_id, reason=f"the trace ended with status {status}; its limits are {limits}"))


def _answer(request: TraceRequest) -> NoReturn:
    """Trace a request in this child, and end."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    signal.alarm(DEADLINE_S)
    try:
        _write(TraceReply(id=request.id, peak=peak_of(request.job)))
    except NotTraced as error:
        _write(TraceReply(id=request.id, reason=str(error)))
    except Exception as error:  # noqa: BLE001 - whatever a step raises is the answer
        _write(TraceReply(id=request.id, reason=f"the step raised {type(error).__name__}: {error}"[:1000]))
    os._exit(0)


def _write(reply: TraceReply) -> None:
    """Write a line at once, as children write too: no other's is inside of it, as long as the pipe takes it whole."""
    os.write(sys.stdout.fileno(), reply.model_dump_json().encode() + b"\n")


def main() -> int:
    device()
    gc.collect()
    gc.freeze()
    Planner().run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Trace jobs on request: `python -m octet.worker.planning` reads one JSON line for each and answers one.

Everything is loaded once. For each number of sequences that a job is traced with, a forked child with limits of time and
memory does it, so that nothing it does stays, and a job's children run side by side; the traces of one child share what torch
keeps of ops it has seen. The parent never runs a backward pass, since autograd does not survive a fork. It ends when its input
does.
"""

import ctypes
import gc
import json
import os
import resource
import selectors
import signal
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from octet.api_schemas.models.huggingface import NetworkShapes
from octet.api_schemas.plan import TraceReply, TraceRequest, trace_key
from octet.worker.models.huggingface import transformers
from octet.worker.planning.curve import Moment
from octet.worker.planning.fake_gpu import fake_gpu
from octet.worker.planning.moments import Tracing, counts, depth_of, peak_of, traces_of
from octet.worker.planning.trace import NotTraced, Trace, check, find_network

CPU_S = 60
DEADLINE_S = 300
MEMORY_BYTES = 4 << 30
MOST_CHILDREN = 4
MOST_KEPT = 8
"""Jobs whose traces stay, for the same one at other depths: a few megabytes each."""
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass
class Plan:
    """A request with the traces that it has so far, by their number of sequences."""

    request: TraceRequest
    traces: dict[int, Tracing] = field(default_factory=dict)
    network: NetworkShapes | None = None
    is_answered: bool = False

    def answer(self, reply: TraceReply) -> None:
        """Write the reply, once."""
        if not self.is_answered:
            self.is_answered = True
            sys.stdout.write(reply.model_dump_json() + "\n")
            sys.stdout.flush()

    def fail(self, reason: str) -> None:
        """Answer with the reason for which there is no peak."""
        self.answer(TraceReply(id=self.request.id, reason=reason, network=self.network))


class Child(NamedTuple):
    """A process that traces a plan's job with so many sequences. result: the file into which it writes its traces."""

    process_id: int
    plan: Plan
    num_sequences: int
    result: int


class Planner:
    """The traces that wait, and the children that run."""

    def __init__(self) -> None:
        self.selector = selectors.PollSelector()  # which takes a file as input, too
        self.waiting: deque[tuple[Plan, int]] = deque()
        self.children: dict[int, Child] = {}
        """By the descriptor of the process."""
        self.kept: dict[str, list[Tracing]] = {}
        """Traces that are complete, in the order of their numbers of sequences, by the key of any depth."""
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
                self._start(*self.waiting.popleft())

    def _read(self, stdin: int) -> None:
        chunk = os.read(stdin, 1 << 16)
        if not chunk:
            self.selector.unregister(stdin)
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in filter(bytes.strip, lines):
            plan = Plan(TraceRequest.model_validate_json(line))
            try:
                check(plan.request.job)
            except NotTraced as error:
                plan.fail(str(error))
            else:
                if plan.request.job.model.family == "huggingface":
                    transformers()  # takes a second and a half, once and not in each child
                depth = _depth_of(plan.request)
                if depth is not None and (found := self.kept.get(trace_key(plan.request, any_depth=True))):
                    _complete(plan, [tracing._replace(depth=depth) for tracing in found])
                    continue
                _, sequences = counts(plan.request.job)
                self.waiting += [(plan, num_sequences) for num_sequences in sequences]

    def _start(self, plan: Plan, num_sequences: int) -> None:
        if plan.is_answered:  # its other child failed
            return
        result = os.memfd_create("traces")
        parent = os.getpid()
        process_id = os.fork()
        if not process_id:
            _trace_in_child(parent, plan.request, num_sequences, result)
        descriptor = os.pidfd_open(process_id)
        self.children[descriptor] = Child(process_id, plan, num_sequences, result)
        self.selector.register(descriptor, selectors.EVENT_READ)

    def _reap(self, descriptor: int) -> None:
        child = self.children.pop(descriptor)
        self.selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(child.process_id, 0)
        with os.fdopen(child.result) as result:
            result.seek(0)
            content = result.read()
        if status:
            limits = f"{CPU_S} s of CPU, {DEADLINE_S} s, {MEMORY_BYTES >> 30} GiB"
            child.plan.fail(f"the trace ended with status {status}; its limits are {limits}")
            return
        found = json.loads(content)
        if found["network"] is not None:
            child.plan.network = NetworkShapes.model_validate(found["network"])
        if found["reason"] is not None:
            child.plan.fail(found["reason"])
        else:
            self._note(child.plan, child.num_sequences, _read(found["tracing"]))

    def _note(self, plan: Plan, num_sequences: int, found: Tracing) -> None:
        """Note traces. The last ones of a plan complete it, and stay for others that differ in their depth alone."""
        plan.traces[num_sequences] = found
        _, sequences = counts(plan.request.job)
        if plan.traces.keys() == set(sequences):
            tracings = [plan.traces[number] for number in sequences]
            _complete(plan, tracings)
            if _depth_of(plan.request) is not None:
                self.kept[trace_key(plan.request, any_depth=True)] = tracings
                while len(self.kept) > MOST_KEPT:
                    del self.kept[next(iter(self.kept))]


def _depth_of(request: TraceRequest) -> int | None:
    """Return the depth that a job has by its sizes; None where a configuration sets it, or blocks differ."""
    is_looked_at = request.job.model.family == "huggingface"
    return None if is_looked_at else depth_of(request.job, request.pipeline_rank)


def _complete(plan: Plan, tracings: list[Tracing]) -> None:
    """Answer a plan by its traces. tracings: of each number of sequences, in their order."""
    try:
        peak = peak_of(plan.request.job, tracings)
    except ValueError as error:
        plan.fail(f"its traces do not fit each other: {error}")
    else:
        plan.answer(TraceReply(id=plan.request.id, peak=peak, network=plan.network))


def _trace_in_child(parent: int, request: TraceRequest, num_sequences: int, result: int) -> NoReturn:
    """Write the traces of a job, or the reason for which there are none, and end."""
    _leave(parent)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    signal.alarm(DEADLINE_S)
    job, config = request.job, request.config
    found: dict[str, Any] = {"network": None, "reason": None, "tracing": None}
    try:
        if (network := find_network(job, config)) is not None:
            found["network"] = network.shapes.model_dump(mode="json")
        found["tracing"] = traces_of(job, num_sequences, request.pipeline_rank, config, network)
    except NotTraced as error:
        found["reason"] = str(error)
    except Exception as error:  # noqa: BLE001 - whatever a step raises is the answer
        found["reason"] = f"the step raised {type(error).__name__}: {error}"[:1000]
    with os.fdopen(result, "w") as file:
        file.write(json.dumps(found))  # a tenth of the time of json.dump, which encodes in Python
    os._exit(0)


def _leave(parent: int) -> None:
    """Let go of the parent's requests and replies, and end when it does. parent: its process ID.

    A child that kept the pipe of replies would keep whoever reads it waiting after the parent's end.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it was asked for
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (sys.stdin.fileno(), sys.stdout.fileno()):
        os.dup2(nothing, descriptor)


def _read(tracing: Any) -> Tracing:
    """Return what a child has written."""
    blocks, depth, traces = tracing
    return Tracing(
        tuple(blocks),
        depth,
        [Trace([[Moment(*moment) for moment in phase] for phase in phases], *others) for phases, *others in traces],
    )


def main() -> int:
    with fake_gpu():
        pass  # torch loads its compiler with the first fake tensors, for a second and a half that each child would take
    gc.collect()
    gc.freeze()
    Planner().run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

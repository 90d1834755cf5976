"""Trace jobs on request: `python -m octet.worker.planning` reads a JSON line for each and answers one or two.

Everything is loaded once. Each trace of a job is made by a forked child with limits of time and memory, so that nothing it does
stays, and a job's children run side by side. Those with its own micro-batch come first, and with them the peak is known; those
with a wider one say how it grows, in a second line. The parent ends when its input does.
"""

import ctypes
import gc
import json
import math
import os
import resource
import selectors
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from octet.api_schemas import JobSpec
from octet.api_schemas.models.huggingface import NetworkShapes
from octet.api_schemas.peak import Peak
from octet.api_schemas.plan import TraceReply, TraceRequest, trace_key
from octet.worker.models.huggingface import transformers
from octet.worker.planning.curve import Moment
from octet.worker.planning.fake_gpu import fake_gpu
from octet.worker.planning.moments import Tracing, counts, depth_of, peak_of, traces_of
from octet.worker.planning.trace import NotTraced, Trace, check, find_network, trace

CPU_S = 60
DEADLINE_S = 300
MEMORY_BYTES = 2 << 30
MOST_CHILDREN = 4
MOST_KEPT = 8
"""Jobs whose traces stay, for the same one at other depths: a few megabytes each."""
WARM_UP: dict[str, dict[str, int]] = {"llama": {"zero_stage": 3}, "gpt": {"tensor": 2, "pipeline": 2}}
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class Piece(NamedTuple):
    """A child's part of a job's traces. num_blocks: None for all that it is traced with, of a network that the child finds."""

    num_sequences: int
    num_blocks: int | None


@dataclass
class Plan:
    """A request with the traces that it has so far."""

    request: TraceRequest
    traces: dict[Piece, Tracing] = field(default_factory=dict)
    network: NetworkShapes | None = None
    own: Peak | None = None
    """The peak of the job's own micro-batch, once it is known."""
    is_answered: bool = False

    def answer(self, reply: TraceReply) -> None:
        """Write a reply, unless the last one, without more, has been written."""
        if not self.is_answered:
            self.is_answered = not reply.more
            sys.stdout.write(reply.model_dump_json() + "\n")
            sys.stdout.flush()

    def tracings(self) -> list[Tracing]:
        """Return the traces of each number of sequences, in their order, as far as they are complete."""
        found = []
        for pieces in pieces_of(self.request):
            parts = [self.traces[piece] for piece in pieces if piece in self.traces]
            if len(parts) < len(pieces):
                break
            found.append(parts[0]._replace(traces=[each for part in parts for each in part.traces]))
        return found

    def fail(self, reason: str) -> None:
        """Answer with the reason for which there is no peak, or none of wider micro-batches."""
        self.answer(TraceReply(id=self.request.id, peak=self.own, reason=reason, network=self.network))


class Child(NamedTuple):
    """A process that traces a piece of a plan's job. result: the file into which it writes its traces."""

    process_id: int
    plan: Plan
    piece: Piece
    result: int


class Planner:
    """The traces that wait, and the children that run."""

    def __init__(self) -> None:
        self.selector = selectors.PollSelector()  # which takes a file as input, too
        self.waiting: list[tuple[Plan, Piece]] = []
        self.children: dict[int, Child] = {}
        """By the descriptor of the process."""
        self.kept: dict[str, list[Tracing]] = {}
        """Traces that are complete, in the order of their numbers of sequences, by the key of any depth."""
        self.is_warm = False
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
                self._start(*self.waiting.pop(0))
            if not (self.children or self.waiting or self.is_warm) and stdin in self.selector.get_map():
                self.is_warm = True
                warm_up()

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
                self._queue(plan)

    def _queue(self, plan: Plan) -> None:
        """Let a plan wait. The job's own micro-batch comes before wider ones, on all ranks of its pipeline.

        Of those, the trace of more blocks comes first: it takes longer, and the last ones end together.
        """
        own, *wider = pieces_of(plan.request)

        def is_own(other: Plan, piece: Piece) -> bool:
            return piece.num_sequences == own[0].num_sequences and other.request.job == plan.request.job

        jobs = [other.request.job for other, _ in self.waiting]
        place = jobs.index(plan.request.job) if plan.request.job in jobs else len(jobs)
        together = [*filter(lambda entry: is_own(*entry), self.waiting), *((plan, piece) for piece in own)]
        together.sort(key=lambda entry: entry[1].num_blocks or 0, reverse=True)
        self.waiting = [entry for entry in self.waiting if not is_own(*entry)]
        self.waiting[place:place] = together
        self.waiting += [(plan, piece) for pieces in wider for piece in pieces]

    def _start(self, plan: Plan, piece: Piece) -> None:
        if plan.is_answered:  # its other child failed
            return
        result = os.memfd_create("traces")
        parent = os.getpid()
        process_id = os.fork()
        if not process_id:
            _trace_in_child(parent, plan.request, piece, result)
        descriptor = os.pidfd_open(process_id)
        self.children[descriptor] = Child(process_id, plan, piece, result)
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
            child.plan.traces[child.piece] = _read(found["tracing"])
            self._note(child.plan, child.piece)

    def _note(self, plan: Plan, piece: Piece) -> None:
        """Note a piece. The last one of a plan completes it, and all stay for others that differ in their depth alone."""
        tracings, pieces = plan.tracings(), pieces_of(plan.request)
        if len(tracings) == len(pieces):
            _complete(plan, tracings)
            if _depth_of(plan.request) is not None:
                self.kept[trace_key(plan.request, any_depth=True)] = tracings
                while len(self.kept) > MOST_KEPT:
                    del self.kept[next(iter(self.kept))]
        elif tracings and piece in pieces[0]:
            _complete(plan, tracings)


def _depth_of(request: TraceRequest) -> int | None:
    """Return the depth that a job has by its sizes; None where a configuration sets it, or blocks differ."""
    is_looked_at = request.job.model.family == "huggingface"
    return None if is_looked_at else depth_of(request.job, request.pipeline_rank)


def pieces_of(request: TraceRequest) -> list[list[Piece]]:
    """Return what has to be traced, by the number of sequences; the job's own is the first."""
    blocks, sequences = counts(request.job)
    traced = (None,) if _depth_of(request) is None else blocks
    return [[Piece(num_sequences, num_blocks) for num_blocks in traced] for num_sequences in sequences]


def _complete(plan: Plan, tracings: list[Tracing]) -> None:
    """Answer a plan by its traces. tracings: of each number of sequences, in their order, or of the first."""
    try:
        peak = peak_of(plan.request.job, tracings)
    except ValueError as error:
        plan.fail(f"its traces do not fit each other: {error}")
    else:
        plan.own, more = peak, not peak.by_micro_batch
        reason = "its largest micro-batch is being traced" if more else None
        plan.answer(TraceReply(id=plan.request.id, more=more, peak=peak, reason=reason, network=plan.network))


def _trace_in_child(parent: int, request: TraceRequest, piece: Piece, result: int) -> NoReturn:
    """Write the traces of a job, or the reason for which there are none, and end."""
    _leave(parent)
    gc.freeze()  # what the parent keeps: to look at it would copy it
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    signal.alarm(DEADLINE_S)
    job, config = request.job, request.config
    found: dict[str, Any] = {"network": None, "reason": None, "tracing": None}
    try:
        if (network := find_network(job, config)) is not None:
            found["network"] = network.shapes.model_dump(mode="json")
        found["tracing"] = traces_of(job, piece.num_sequences, request.pipeline_rank, config, network, piece.num_blocks)
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
    blocks, depth, traces, level = tracing
    return Tracing(
        tuple(blocks),
        depth,
        [Trace([[Moment(*moment) for moment in phase] for phase in phases], *others) for phases, *others in traces],
        level,
    )


def warm_up() -> None:
    """Trace two small jobs, so that later children have what a step loads, and know its ops: up to half a second less for each.

    The first plan of a process does not wait for it.
    """
    for model, parallelism in WARM_UP.items():
        sizes = {"hidden_size": 1024, "num_layers": 4, "num_heads": 8, "vocab_size": 1024, "max_sequence_length": 128}
        grouped = {"num_key_value_heads": 4, "intermediate_size": 2048} if model == "llama" else {}
        workers = math.prod(parallelism.get(axis, 1) for axis in ("tensor", "pipeline")) * 2
        job = {
            "name": "warm-up",
            "model": {"family": model, **sizes, **grouped},
            "precision": {"level": "O2"},
            "data": {"source": "tokens", "path": "/none"},
            "training": {"steps": 1, "sequence_length": 128, "global_batch_size": 4 * workers, "micro_batch_size": 1},
            "parallelism": parallelism,
            "resources": {"workers": workers},
        }
        trace(JobSpec.model_validate(job), 2, 1)
    gc.collect()
    gc.freeze()


def main() -> int:
    with suppress(OSError):  # where memory ends, this ends first, and not the server that asks it
        Path("/proc/self/oom_score_adj").write_text("1000")
    # torch starts a thread for each device at the first backward pass, and a child cannot pass backward once there is one. So
    # the first pass comes before there is a device.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.zeros((), requires_grad=True).backward()
    with fake_gpu():
        pass  # torch loads its compiler with the first fake tensors, for a second and a half that each child would take
    gc.collect()
    gc.freeze()
    Planner().run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

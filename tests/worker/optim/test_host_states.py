"""States in host memory, on streams that run late and in any order that their waits allow, as those of a GPU.

The fake GPU gives memory again to the stream that made it as soon as Python has freed it, as torch's allocator does.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from octet.worker.optim import host_states
from octet.worker.optim.host_states import HostStates

DEVICE = torch.device("cuda", 0)
NUM_PARAMETERS, NUM_STEPS = 5, 3
STREAMS = ("steps", "to device", "to host")


class Block:
    """A place in the device's memory."""

    value: Any = "poison"


class Stream:
    """A queue of work. A wait is work that is done once another queue has got far enough."""

    def __init__(self, gpu: "LateGpu", name: str) -> None:
        self.gpu, self.name, self.num_done = gpu, name, 0
        self.queue: list[tuple[str, Callable[[], bool]]] = []
        self.pool: list[Block] = []

    def add(self, what: str, work: Callable[[], object]) -> None:
        self.queue.append((what, lambda: (work(), True)[1]))

    def wait_event(self, event: "tuple[Stream, int]") -> None:
        other, place = event
        self.queue.append(("wait", lambda: other.num_done >= place))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> "tuple[Stream, int]":
        return self, len(self.queue)

    def advance(self) -> str | None:
        """Do the next work. Returns its name; None if there is none, or if it waits."""
        if self.num_done == len(self.queue):
            return None
        what, work = self.queue[self.num_done]
        if not work():
            return None
        self.num_done += 1
        return what


class LateGpu:
    """A stand-in for torch.cuda."""

    def __init__(self) -> None:
        self.streams = [Stream(self, "steps")]
        self.present = self.streams[0]

    def Stream(self, _device: object) -> Stream:
        self.streams.append(Stream(self, STREAMS[len(self.streams)]))
        return self.streams[-1]

    def current_stream(self, _device: object) -> Stream:
        return self.present

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.present, before = stream, self.present
        yield
        self.present = before

    def run(self, choose: Callable[[list[Stream]], list[Stream]]) -> list[str]:
        """Run all work; choose: the order in which streams are tried each time. Returns what was done, in order."""
        done: list[str] = []
        while (what := next((what for stream in choose(self.streams) if (what := stream.advance())), None)) is not None:
            done.append(what)
        assert all(stream.num_done == len(stream.queue) for stream in self.streams), "streams wait for each other"
        return done


class DeviceTensor:
    def __init__(self, gpu: LateGpu) -> None:
        self.home = gpu.present
        self.block = self.home.pool.pop() if self.home.pool else Block()

    def __del__(self) -> None:
        self.home.pool.append(self.block)


class HostTensor:
    """Pinned memory with one number: the steps that have been taken."""

    def __init__(self, gpu: LateGpu, number: int) -> None:
        self.gpu, self.number, self.value = gpu, number, 0

    def to(self, _device: torch.device, *, copy: bool, non_blocking: bool) -> DeviceTensor:
        assert copy
        assert non_blocking
        made = DeviceTensor(self.gpu)
        block = made.block
        self.gpu.present.add(f"fetch {self.number}", lambda: setattr(block, "value", self.value))
        return made

    def copy_(self, source: DeviceTensor, *, non_blocking: bool) -> None:
        assert non_blocking
        block = source.block
        self.gpu.present.add(f"store {self.number}", lambda: setattr(self, "value", block.value))


class Parameter:
    device = DEVICE


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> LateGpu:
    made = LateGpu()
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(host_states.torch.cuda, name, getattr(made, name))
    return made


def take_steps(gpu: LateGpu, num_steps: int) -> list[HostTensor]:
    """Enqueue steps that add one to each state. Returns the states."""
    held = [HostTensor(gpu, number) for number in range(NUM_PARAMETERS)]
    updates: Any = [(Parameter(), {}) for _ in held]
    states: Any = {parameter: {"m": {"codes": host}} for (parameter, _), host in zip(updates, held, strict=True)}
    offloaded = HostStates(["m"])

    def add_one(block: Block) -> None:
        block.value += 1

    for _ in range(num_steps):
        for parameter, _ in offloaded.visit(updates, states):
            block = states[parameter]["m"]["codes"].block
            gpu.present.add("step", lambda block=block: add_one(block))
    return held


@pytest.mark.parametrize("seed", range(20))
def test_states_are_right_in_any_order_of_streams(gpu: LateGpu, seed: int) -> None:
    held = take_steps(gpu, NUM_STEPS)
    draw = random.Random(seed)
    gpu.run(lambda streams: draw.sample(streams, len(streams)))
    assert [host.value for host in held] == [NUM_STEPS] * NUM_PARAMETERS


@pytest.mark.parametrize("first", range(3))
def test_states_are_right_if_one_stream_runs_ahead(gpu: LateGpu, first: int) -> None:
    held = take_steps(gpu, NUM_STEPS)
    gpu.run(lambda streams: [streams[first], *streams])
    assert [host.value for host in held] == [NUM_STEPS] * NUM_PARAMETERS


def test_both_directions_copy_at_once(gpu: LateGpu) -> None:
    """The next states arrive while those of the present are on their way back. A third is fetched into their memory."""
    take_steps(gpu, 1)
    done = [what for what in gpu.run(lambda streams: sorted(streams, key=lambda stream: stream.name == "to host"))]
    assert done.index("fetch 2") < done.index("store 1")
    assert done.index("store 0") < done.index("fetch 2")
    assert sum(len(stream.pool) for stream in gpu.streams) <= 3

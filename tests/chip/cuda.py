"""Stand-ins for torch.cuda's streams and events on the chip."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from tests.chip.timelines import Timeline


class Stream:
    """A stream of the chip. As torch's, it is made for a device and may be waited for."""

    chip: Any
    """The chip in use; set while one is."""

    def __init__(self, device: Any = None, priority: int = 0, *, timeline: Timeline | None = None) -> None:
        self.index = self.chip.index_of(device)
        self.timeline = timeline or Timeline(f"stream {Timeline.num_made} of device {self.index}")
        self.chip.all_streams.append(self)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def wait_stream(self, other: Self) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        if event.clock is not None:
            self.timeline.join(event.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.chip.wait("stream.synchronize", self.timeline)

    def query(self) -> bool:
        return True

    def __enter__(self) -> Self:
        self.chip.streams_outside.append(self.chip.current_stream(self.index))
        self.chip.streams[self.index] = self
        return self

    def __exit__(self, *_raised: object) -> None:
        self.chip.streams[self.index] = self.chip.streams_outside.pop()


class Event:
    """A moment of a stream. clock: what the stream knew then; None before it is recorded."""

    def __init__(self, enable_timing: bool = False, **_options: object) -> None:
        self.clock: dict[int, int] | None = None
        self.launch = 0

    def record(self, stream: Stream | None = None) -> None:
        chip = Stream.chip
        timeline = (stream or chip.current_stream()).timeline
        timeline.join(chip.host.clock)
        self.clock, self.launch = dict(timeline.clock), chip.num_launches

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream.chip.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        chip = Stream.chip
        if self.clock is not None:
            if self.launch >= chip.first_launch:
                chip.count_wait("event.synchronize")
            chip.host.join(self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _later: Self) -> float:
        return 1.0


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Run what is inside in a stream."""
    if stream is None:
        yield
        return
    with stream:
        yield

"""What a signal does for a while. Only the main thread may set it."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def handled(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    """These signals call `handler` inside the block and what they called before after it."""
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in former.items():
            signal.signal(number, handler_before)


def leave(number: int, frame: FrameType | None) -> None:
    """Unwind the stack as Ctrl-C does, so that what was started is stopped."""
    raise SystemExit(128 + number)

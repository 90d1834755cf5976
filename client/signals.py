"""Handle signals for the length of a block. Only the main thread may do so."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def handled(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Call `handler` for these signals inside the block; restore the former handlers after it."""
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in former.items():
            signal.signal(number, handler_before)


def leave(number: int, frame: FrameType | None) -> None:
    """Unwind the stack as Ctrl-C does, so that what was started is stopped."""
    raise SystemExit(128 + number)

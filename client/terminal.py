"""Write results to standard output and errors to standard error; plain lines if nobody watches."""

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from octet.client.text import printable

_UNLIMITED_WIDTH = 10_000


class Terminal:
    """The two streams of one command."""

    def __init__(self) -> None:
        self.out = _console(sys.stdout)
        self._wide = _console(sys.stdout, width=_UNLIMITED_WIDTH)
        self._err = _console(sys.stderr, width=_UNLIMITED_WIDTH)

    @property
    def is_live(self) -> bool:
        """Return True if standard output is a terminal that can be redrawn."""
        return self.out.is_terminal and not self.out.is_dumb_terminal

    def show(self, what: RenderableType) -> None:
        """Print a table so that it fits the terminal, and text in full: the terminal breaks its lines.

        A pipe gets all in full.
        """
        if self.is_live and not isinstance(what, Text):
            self.out.print(what)
            return
        for line in self._wide.render_lines(what, pad=False):
            self._wide.print(Segments(_without_trailing_blanks(line)))

    def note(self, text: str) -> None:
        """Print a remark on standard error, beside the answer."""
        self._err.print(printable(text))

    def spinner_on_stderr(self, text: str) -> AbstractContextManager[object]:
        """Show that we wait, and leave standard output to the answer."""
        return self._err.status(text) if self._err.is_terminal else nullcontext()

    def spinner(self, text: str) -> AbstractContextManager[object]:
        """Show that we wait: a spinner on a terminal, one line on a pipe."""
        if self.is_live:
            return self.out.status(text)
        self.out.print(text)
        return nullcontext()

    def complain(self, text: str) -> None:
        self._err.print(printable(text), style="red")

    def show_json(self, model: BaseModel) -> None:
        """Print one document, indented."""
        self.out.file.write(model.model_dump_json(indent=2) + "\n")

    def show_json_array(self, models: Iterable[BaseModel]) -> None:
        """Print one document: an array with an element per line."""
        lines = ",\n".join(f"  {model.model_dump_json()}" for model in models)
        self.out.file.write(f"[\n{lines}\n]\n" if lines else "[]\n")

    def show_json_line(self, model: BaseModel) -> None:
        """Print one document of a stream and flush it."""
        self.out.file.write(model.model_dump_json() + "\n")
        self.out.file.flush()


def _console(stream: TextIO, width: int | None = None) -> Console:
    # FORCE_COLOR must not put control characters into a file, so the stream alone decides.
    return Console(file=stream, force_terminal=stream.isatty(), width=width, markup=False, highlight=False, emoji=False)


def _without_trailing_blanks(line: Iterable[Segment]) -> list[Segment]:
    """Tables fill their last column with blanks, which a narrow terminal would show as empty lines."""
    segments = list(Segment.simplify(line))
    while segments and not segments[-1].text.strip():
        segments.pop()
    if segments:
        text, style, _ = segments[-1]
        segments[-1] = Segment(text.rstrip(), style)
    return [*segments, Segment.line()]

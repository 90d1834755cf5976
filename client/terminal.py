"""Where the commands write: results on standard output, errors on standard error; plain lines where nobody watches."""

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

from pydantic import BaseModel
from rich.console import Console, RenderableType

from client.text import printable

_UNLIMITED_WIDTH = 10_000


class Terminal:
    """The two streams of one command."""

    def __init__(self) -> None:
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr)

    @property
    def is_live(self) -> bool:
        """Whether standard output can be redrawn."""
        return self.out.is_terminal and not self.out.is_dumb_terminal

    def show(self, what: RenderableType) -> None:
        self.out.print(what)

    def spinner(self, text: str) -> AbstractContextManager[object]:
        """Something that moves while we wait; on a pipe, one line."""
        if self.is_live:
            return self.out.status(text)
        self.out.print(text)
        return nullcontext()

    def complain(self, text: str) -> None:
        self.err.print(printable(text), style="red")

    def show_json(self, model: BaseModel) -> None:
        """One document, indented."""
        self.out.file.write(model.model_dump_json(indent=2) + "\n")

    def show_json_array(self, models: Iterable[BaseModel]) -> None:
        """One document: an array with an element per line."""
        lines = ",\n".join(f"  {model.model_dump_json()}" for model in models)
        self.out.file.write(f"[\n{lines}\n]\n" if lines else "[]\n")

    def show_json_line(self, model: BaseModel) -> None:
        """One document of a stream, sent at once."""
        self.out.file.write(model.model_dump_json() + "\n")
        self.out.file.flush()


def _console(stream: TextIO) -> Console:
    is_terminal = stream.isatty()
    return Console(
        file=stream,
        force_terminal=is_terminal,  # FORCE_COLOR must not put control characters into a file
        width=None if is_terminal else _UNLIMITED_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=not is_terminal,
    )

"""Fixtures that tests of kernels share."""

from typing import Any

import pytest


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that Triton's interpreter was given to run."""
    from octet.worker.kernels.cuda import language  # which must be loaded after `pytest_configure` has chosen the interpreter

    names: list[str] = []
    run = language.triton.runtime.interpreter.InterpretedFunction.run

    def note(kernel: Any, *arguments: Any, **options: Any) -> Any:
        names.append(kernel.fn.__name__)
        return run(kernel, *arguments, **options)

    monkeypatch.setattr(language.triton.runtime.interpreter.InterpretedFunction, "run", note)
    return names

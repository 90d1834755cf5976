"""Triton's interpreter, made faster: it patches its language once in a launch, not in each call of a device function.

Each of our kernels calls device functions, and to patch the language looks through its modules: a third of the kernels' tests.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from triton import language
from triton.runtime import interpreter


def patch_once_in_a_launch() -> None:
    """Change the interpreter of this process. What a launch patches stays patched to its end anyway."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[Any] = set()

    def patch_unless_done(function: Any) -> Any:
        wanted = _languages_of(function)
        if wanted <= patched:
            return interpreter._LangPatchScope()
        patched.update(wanted)
        return patch(function)

    def launch_and_forget(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        try:
            launch(self, *arguments, **options)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_unless_done
    interpreter.GridExecutor.__call__ = launch_and_forget


@cache
def _languages_of(function: Callable[..., Any]) -> frozenset[Any]:
    """Return the modules that the interpreter patches for a function: those of the language that it sees."""
    return frozenset(value for value in function.__globals__.values() if value is language or value is language.core)

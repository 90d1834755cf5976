"""Parse Python sources for tests that look at the code."""

import ast
import gc


def parse(source: str) -> ast.Module:
    """Parse a source without the garbage collector.

    Python 3.11 counts its depth for all calls together: a finalizer whose warning has a traceback parses lines of code itself,
    and the call around it ends in "AST constructor recursion depth mismatch".
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_enabled:
            gc.enable()

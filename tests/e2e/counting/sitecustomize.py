"""Note every validation of a `JobSpec`, in every process of a server under test.

Python imports this module when it starts, because its folder is on the server's PYTHONPATH; the keeper, Ray and the ranks
inherit that. Each validation appends the id of its process, as one line, to the file that VALIDATIONS_FILE names.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

COUNTED_MODULE = "octet.api_schemas.job"


class CountingFinder(importlib.abc.MetaPathFinder):
    """Find the contract's module as Python would, and wrap the check of its specs once it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != COUNTED_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_count(module: ModuleType) -> None:
            execute(module)
            count_validations(module)

        spec.loader.exec_module = execute_and_count  # type: ignore[method-assign]
        return spec


def count_validations(module: Any) -> None:
    """Wrap the check that runs once for each spec that is parsed, and again where a parsed one is passed through."""
    file, check = Path(os.environ["VALIDATIONS_FILE"]), module.check_job
    parsed: dict[int, Any] = {}  # holds the specs, so that no id comes back

    def note_and_check(spec: Any) -> Any:
        if id(spec) not in parsed:
            parsed[id(spec)] = spec
            with file.open("a") as lines:
                lines.write(f"{os.getpid()}\n")
        return check(spec)

    module.check_job = note_and_check


if "VALIDATIONS_FILE" in os.environ:
    sys.meta_path.insert(0, CountingFinder())

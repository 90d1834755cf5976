"""Print what the named extras of a pyproject.toml require, so that an image's dependencies are a layer apart from its code."""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Return the project's own dependencies, then those of the extras."""
    project = tomllib.loads(pyproject.read_text())["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path(sys.argv[1]), sys.argv[2:])) + "\n")

"""Each line of images has one lock that fits the pinned versions, and the documents name the driver that it needs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.docker.requirements import requirements
from deploy.install_torch import pinned
from octet.worker.metrics.driver import IMAGE_LINES, OLDEST_DRIVER
from tests.kit.waiting import WHOLE_RUN_S

ROOT = Path(__file__).parents[2]
LOCKS = {path.stem: path for path in sorted((ROOT / "deploy/docker/torch").glob("*.txt"))}
OURS = pinned(ROOT / "constraints.txt")


@pytest.mark.parametrize("line", LOCKS)
def test_a_lock_has_the_pinned_torch(line: str) -> None:
    lock = pinned(LOCKS[line])
    version, _, local = lock["torch"].partition("+")
    assert version == OURS["torch"]
    assert local == ("" if line == "cu130" else line), "PyPI's build has no local version; PyTorch's indexes name the line"
    assert line == "cpu" or lock["triton"] == OURS["triton"]


def test_a_node_has_the_newest_line_by_default() -> None:
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    (line,) = re.findall(r"^ARG TORCH_LINE=(\w+)$", dockerfile, re.MULTILINE)
    assert line == list(IMAGE_LINES)[-1]
    assert "!deploy/docker/torch\n" in (ROOT / ".dockerignore").read_text()


@pytest.mark.parametrize("line", IMAGE_LINES)
def test_the_page_names_the_driver_of_a_line(line: str) -> None:
    major, minor = IMAGE_LINES[line]
    rows = [row for row in (ROOT / "docs/deploy.md").read_text().splitlines() if row.startswith(f"| `{line}` |")]
    (row,) = rows
    assert f"| {major}.{minor} | {OLDEST_DRIVER[major]} or later |" in row


@pytest.mark.system
def test_pip_resolves_the_line_of_pypi(tmp_path: Path) -> None:
    """Resolve what an image installs, without installing. The other lines are on PyTorch's indexes alone."""
    wanted, constraints = tmp_path / "node.txt", tmp_path / "constraints.txt"
    wanted.write_text("\n".join(requirements(ROOT / "pyproject.toml", ["service", "worker", "ao", "models"])))
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    constraints.write_text("".join(line for line in lines if not line.startswith(("torch==", "triton=="))))
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    options = ["--constraint", str(constraints), "--requirement", str(LOCKS["cu130"]), "--requirement", str(wanted)]
    answer = subprocess.run([*pip, *options], capture_output=True, text=True, check=False, timeout=WHOLE_RUN_S)
    assert answer.returncode == 0, answer.stderr

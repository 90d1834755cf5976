"""Each line of images has one lock that fits the pinned versions, and the documents name the driver that it needs."""

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import requires
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
@pytest.mark.parametrize("line", IMAGE_LINES)
def test_a_line_is_resolved_to_its_lock(line: str, tmp_path: Path) -> None:
    """Resolve what an image installs. uv reads the requirements of packages alone, where pip's --dry-run downloads gigabytes.

    Of PyTorch's own indexes a wheel without content stands in for torch, with the requirements that are known of it.
    """
    wanted, constraints = tmp_path / "node.txt", tmp_path / "constraints.txt"
    wanted.write_text("\n".join(requirements(ROOT / "pyproject.toml", ["service", "worker", "ao", "models"])))
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    constraints.write_text("".join(line for line in lines if not line.startswith("torch==")))
    if line in OF_NVIDIA:
        write_torch_wheel(tmp_path, line)
    resolve = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    files = ["--find-links", str(tmp_path), "--constraint", str(constraints), str(LOCKS[line]), str(wanted)]
    index = {"UV_DEFAULT_INDEX": os.environ["PIP_INDEX_URL"]} if "PIP_INDEX_URL" in os.environ else {}
    answer = subprocess.run(
        [*resolve, *files], capture_output=True, text=True, check=False, timeout=WHOLE_RUN_S, env=os.environ | index
    )
    assert answer.returncode == 0, answer.stderr
    found = tmp_path / "found.txt"
    found.write_text(answer.stdout)
    of_cuda = {name for name in pinned(found) if name.startswith(("cuda-", "nvidia-")) and name not in OURS}
    assert of_cuda == pinned(LOCKS[line]).keys() - {"torch", "triton"}, "the lock has all of NVIDIA's packages, and no others"


OF_NVIDIA = {
    "cu126": ("12.6.3", {"nvidia-cudnn-cu12": "9.10.2.21", "nvidia-cusparselt-cu12": "0.7.1", "nvidia-nccl-cu12": "2.29.3"}),
    "cu129": ("12.9.1", {"nvidia-cudnn-cu12": "9.20.0.48", "nvidia-cusparselt-cu12": "0.8.1", "nvidia-nccl-cu12": "2.29.7"}),
}
"""The version of cuda-toolkit, and of what it does not have, that torch requires: at cu126 by the release workflow of
pytorch/pytorch, at cu129 by two published locks that agree."""
PARTS = "cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx"


def write_torch_wheel(folder: Path, line: str) -> None:
    """Write a wheel of torch that has the requirements of the line's, and nothing else."""
    version, (toolkit, others) = f"{OURS['torch']}+{line}", OF_NVIDIA[line]
    required = [each for each in requires("torch") or () if "extra ==" not in each and not each.startswith(("cuda", "nvidia"))]
    required += [f"cuda-toolkit[{PARTS}]=={toolkit}", "cuda-bindings>=12.9.4,<13", "nvidia-nvshmem-cu12==3.4.5"]
    required += [f"{name}=={number}" for name, number in others.items()]
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        lines = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}"]
        wheel.writestr(f"{info}/METADATA", "\n".join([*lines, *(f"Requires-Dist: {each}" for each in required), ""]))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")

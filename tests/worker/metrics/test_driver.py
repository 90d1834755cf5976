"""A rank without a CUDA device says why: over what NVML answers for each kind of node."""

import json
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from octet.worker.metrics.driver import IMAGE_LINES, image_line, why_no_device
from octet.worker.rank.main import main

ROOT = Path(__file__).parents[3]


class FakeNvml(ModuleType):
    """NVML of a node with a driver, or, without its version, of one that has none."""

    class NVMLError(Exception):
        """The library's error."""

    def __init__(self, version: str = "", cuda: int = 0, num_devices: int = 8) -> None:
        super().__init__("pynvml")
        self.version, self.cuda, self.num_devices = version, cuda, num_devices
        self.num_open = 0

    def nvmlInit(self) -> None:
        if not self.version:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.version

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return self.num_devices


def install(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, built_for: str | None = "13.0") -> FakeNvml:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    return nvml


@pytest.mark.parametrize(
    ("nvml", "built_for", "expected"),
    [
        (
            FakeNvml("550.54.15", 12040),
            "13.0",
            "driver 550.54.15 is too old for CUDA 13.0: it serves CUDA 12.4 and needs to be 580 or later. "
            "Use image octet/node-cuda:…-cu126, or update the driver.",
        ),
        (FakeNvml("575.51.03", 12090), "13.0", "Use image octet/node-cuda:…-cu129, or update the driver."),
        (FakeNvml("470.57.02", 11040), "12.6", "serves CUDA 11.4 and needs to be 525 or later. Update the driver to 525"),
        (FakeNvml("580.65.06", 13000, num_devices=0), "13.0", "has no device here. Correct the node's label or the pool."),
        (FakeNvml("580.65.06", 13000), "13.0", "has 8 devices and PyTorch sees none. Look at CUDA_VISIBLE_DEVICES"),
        (FakeNvml("550.54.15", 12040), "12.6", "has 8 devices and PyTorch sees none"),
        (FakeNvml(), "13.0", "this node has no NVIDIA driver. Correct the node's label or the pool"),
        (FakeNvml("580.65.06", 13000), None, "is a build without CUDA. Use the image of GPU nodes"),
    ],
    ids=["too-old", "newest-line-that-works", "older-than-all", "no-device", "hidden", "same-major", "no-driver", "cpu-build"],
)
def test_the_reason_names_what_to_change(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, built_for: str | None, expected: str
) -> None:
    install(monkeypatch, nvml, built_for)
    assert expected in why_no_device()
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    ("cuda", "line"), [((12, 4), "cu126"), ((12, 6), "cu126"), ((12, 9), "cu129"), ((13, 2), "cu130"), ((11, 8), None)]
)
def test_the_newest_line_that_a_driver_serves(cuda: tuple[int, int], line: str | None) -> None:
    assert image_line(cuda) == line


def test_every_line_has_its_lock() -> None:
    assert set(IMAGE_LINES) == {path.stem for path in (ROOT / "deploy/docker/torch").glob("cu*.txt")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="missing: a machine without a CUDA device")
def test_a_rank_on_an_old_driver_fails_with_the_advice(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    spec_document: dict[str, object],
) -> None:
    install(monkeypatch, FakeNvml("550.54.15", 12040))
    (tmp_path / "job.json").write_text(json.dumps(spec_document))
    with caplog.at_level(logging.ERROR):
        assert main([str(tmp_path / "job.json"), "--job-dir", str(tmp_path / "run"), "--accelerator", "cuda"]) == 1
    assert "the pool promises a CUDA device: driver 550.54.15 is too old for CUDA 13.0" in caplog.text

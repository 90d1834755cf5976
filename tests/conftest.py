"""Set-up for every test: one thread per process, slow files first, GPU tests skipped without a GPU, and a small job spec."""

import gc
import os
import sys

import pytest
from hypothesis import settings


def pytest_configure(config: pytest.Config) -> None:
    # The OpenMP runtime reads this when torch loads. Ranks, servers and test processes share the machine's cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce())
    config.option.loadscopereorder = False  # of xdist, which starts files with many tests first; below, slow files are first
    if _only_distributes(config):
        return
    gc.disable()  # until everything is collected: it would walk what is imported again and again, a fifth of that time
    settings.register_profile("octet", deadline=None)  # how long an example takes is up to what else the machine does
    settings.load_profile("octet")
    if not _has_fp8_gpu():  # Triton reads this when it is imported, and then runs its kernels on CPU tensors
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.kit.interpreter import patch_once_in_a_launch

        patch_once_in_a_launch()


class FailuresAtOnce:
    """Prints why a test failed as it fails, each reason once: a run that somebody ends prints no summary."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(report.longrepr if crash is None else crash.message)[-1000:]
        if reason not in self._reasons:
            self._reasons.add(reason)
            sys.stderr.write(f"\n{report.nodeid} failed ({report.when}): {reason}\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if any(item.get_closest_marker("gpu") for item in items) and not _has_fp8_gpu():
        missing = pytest.mark.skip(reason="missing: a CUDA device of compute capability 8.9 or later")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(missing)


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays: the collector need not walk it, a tenth of the service tests' time
    gc.enable()


def _only_distributes(config: pytest.Config) -> bool:
    """True in the process of xdist that hands tests to others and runs none; it need not load torch."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")


def _has_fp8_gpu() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.fixture
def spec_document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A small job, as JSON, over existing text: four files of repeated short lines."""
    corpus = tmp_path_factory.mktemp("corpus")
    for number in range(4):
        lines = "\n".join(f"line {line} of file {number}: the quick brown fox" for line in range(200))
        (corpus / f"part_{number}.txt").write_text(lines)
    return {
        "name": "small",
        "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 256, "max_sequence_length": 64},
        "precision": {"level": "fp32"},
        "data": {"source": "text", "path": str(corpus)},
        "training": {"steps": 4, "global_batch_size": 4, "sequence_length": 32, "eval_batches": 2, "seed": 1},
    }


@pytest.fixture
def without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch compute GELU itself: oneDNN, which takes it over on some CPUs, rounds by the tensor's size."""
    import torch

    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)

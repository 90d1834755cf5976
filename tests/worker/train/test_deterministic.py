"""`training.deterministic` allows only operations that give the same bits in every run, for as long as a job trains."""

from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor

from octet.api_schemas import ReportBody, StepReport
from octet.worker.train.passes import deterministic
from tests.kit.training import Recorder, train, with_training


def settings() -> dict[str, bool]:
    cuda: Any = torch.backends.cuda
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn attention": cuda.cudnn_sdp_enabled(),
        "memory-efficient attention": cuda.mem_efficient_sdp_enabled(),
        "flash attention": cuda.flash_sdp_enabled(),
        "compiled to the same bits": inductor.deterministic,
    }


def is_refused() -> bool:
    """Return True if an operation without a deterministic algorithm raises an error."""
    try:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    except RuntimeError as error:
        return "does not have a deterministic implementation" in str(error)
    return False


class Watcher(Recorder):
    """Looks at torch's settings when it hears of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, bool]] = []

    def send(self, body: ReportBody, at: object = None) -> None:
        super().send(body, at)
        if isinstance(body, StepReport):
            self.found.append(settings())


def test_a_job_trains_under_it_and_leaves_the_settings_as_they_were(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    before, plain, exact = settings(), Watcher(), Watcher()
    train(with_training(spec_document, "O2"), tmp_path / "plain", recorder=plain)
    train(with_training(spec_document, "O2", deterministic=True), tmp_path / "exact", recorder=exact)
    assert plain.found == [before] * 4
    assert exact.found == [{name: not name.startswith(("cudnn", "memory")) for name in before}] * 4
    assert settings() == before
    assert exact.losses() == plain.losses()  # on a CPU it changes nothing


def test_what_has_no_deterministic_algorithm_is_refused_inside() -> None:
    assert not is_refused()
    with deterministic(True):
        assert is_refused()
    with deterministic(False):
        assert not is_refused()

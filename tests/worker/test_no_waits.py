"""On an accelerator the host waits for no value in a step, and what is read late is all there: every step, once, in order.

The CPU behaves as an accelerator here. The optimizer takes its kernels' path, in Triton's interpreter.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from api_schemas import EventReport, JobSpec, PhaseReport, StepReport
from api_schemas.levels import LEVELS
from tests.ranks import free_port, run_ranks
from tests.worker.test_train import Recorder, with_training
from worker import fp8_statistics, initialize
from worker.config import RankEnv, resolve
from worker.errors import Cancelled, Diverged, NonFiniteLoss
from worker.fp8.accelerator import cpu_as_accelerator
from worker.fp8.health import STEPS_LATE, LayerDemoted
from worker.mesh import Mesh
from worker.metrics.readback import HostCopy
from worker.optim import LowBitOptimizer
from worker.optim import fused as fused_step
from worker.step_log import StepLog
from worker.train import Trainer

WAITING_OPS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "allclose", "_unique2"}
WAITING_METHODS = {"tolist", "item", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"}
IN_EVERY_RUN = ("O2",)


class WaitingOps(TorchDispatchMode):
    """Counts the ops for which a host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.found.update([name] if name in WAITING_OPS else [])
        return func(*args, **(kwargs or {}))


class WaitingMethods(TorchFunctionMode):
    """Counts the methods of tensors that read values without an op, as `tolist` does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.found.update([name] if name in WAITING_METHODS else [])
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def accelerator() -> Iterator[None]:
    torch.set_num_threads(1)
    with cpu_as_accelerator():
        yield


@pytest.fixture
def kernels_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by the kernels, as on CUDA. Triton's interpreter reads the tensors that a GPU would read."""
    launch = fused_step.kernel.launch

    def launch_unseen(*args: Any) -> None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            launch(*args)

    monkeypatch.setattr(LowBitOptimizer, "is_fused", lambda _optimizer, parameter: parameter.is_contiguous())
    monkeypatch.setattr(fused_step.kernel, "launch", launch_unseen)


@pytest.fixture
def reads_of_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the reads of copies on the host, which are made steps later; whatever else reads is counted."""
    read = HostCopy.read

    def read_unseen(copy: HostCopy) -> Any:
        with torch._C.DisableTorchFunction():
            return read(copy)

    monkeypatch.setattr(HostCopy, "read", read_unseen)


def make(document: dict[str, Any], folder: Path, mesh: Mesh, recorder: Recorder) -> Trainer:
    return Trainer(resolve(JobSpec.model_validate(document), RankEnv()), mesh, recorder, folder)


def run(document: dict[str, Any], folder: Path, recorder: Recorder, *checkpoints: Any) -> Any:
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        return make(document, folder, mesh, recorder).run(checkpoints)


@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize(
    "level", [level if level in IN_EVERY_RUN else pytest.param(level, marks=pytest.mark.matrix) for level in LEVELS]
)
@pytest.mark.usefixtures("kernels_of_the_optimizer", "reads_of_what_has_arrived")
def test_no_step_between_two_reports_waits(tmp_path: Path, spec_document: dict[str, Any], level: str) -> None:
    """With accumulation, clipping, and statistics: the last of the steps is sampled."""
    document = with_training(spec_document, level, steps=100, global_batch_size=2, micro_batch_size=1, gradient_clip=0.1)
    document["model"] = document["model"] | {"hidden_size": 16}
    if LEVELS[level].has_own_fp8:
        document["precision"] = {"level": level, "statistics_every": 2, "demotion": {"patience": 2}}
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        trainer = make(document, tmp_path, mesh, recorder := Recorder())
        trainer.step()
        trainer.log.num_steps = 100  # no report until then
        num_reported = len(recorder.of(StepReport))
        with WaitingMethods() as methods, WaitingOps() as ops:
            trainer.step()
            trainer.step()
        trainer.batches.close()
    assert len(recorder.of(StepReport)) == num_reported
    assert (ops.found, methods.found) == (Counter(), Counter())
    assert [step.step for step in trainer.log.flush().steps][-2:] == [2, 3]


def test_waits_are_seen() -> None:
    with WaitingMethods() as methods, WaitingOps() as ops:
        value = torch.ones(1).sum()
        float(value)
        value.tolist()
        assert value
    assert ops.found["_local_scalar_dense"] == 2
    assert methods.found["tolist"] == 1


def test_the_curve_has_each_step_once_with_its_loss(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(spec_document, "O2", steps=7, eval_every=5)
    summary = run(document, tmp_path / "late", late := Recorder())
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        trainer = make(document, tmp_path / "at_once", mesh, at_once := Recorder())
        trainer.log = StepLog(mesh, is_late=False)
        expected = trainer.run()
    assert [report.step for report in late.of(StepReport)] == list(range(1, 8))
    assert late.losses() == at_once.losses()
    assert summary.evaluation_loss == expected.evaluation_loss
    assert summary.final_loss == expected.final_loss
    norms = [report.gradient_norm for report in late.of(StepReport)]
    assert norms == [report.gradient_norm for report in at_once.of(StepReport)]
    kinds = [type(report) for report in late.reports]
    assert kinds.index(StepReport) < kinds.index(PhaseReport, 1)  # the first step is reported before its phase


def test_steps_are_read_when_the_next_interval_ends(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        trainer = make(with_training(spec_document, steps=100), tmp_path, mesh, recorder := Recorder())
        reported = []
        for _ in range(6):
            trainer.log.num_steps = 2
            trainer.step()
            reported.append([report.step for report in recorder.of(StepReport)])
        trainer.batches.close()
    assert reported == [[], [], [], [1, 2], [1, 2], [1, 2, 3, 4]]


def test_a_resumed_run_is_bit_identical(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(spec_document, "O2", steps=9, checkpoint_every=4)
    document["precision"] = {"level": "O2", "statistics_every": 3, "demotion": {"patience": 1, "min_sqnr_db": 60}}
    run(document, tmp_path / "whole", whole := Recorder())
    interrupted = Recorder(stop_after_step=6)
    with pytest.raises(Cancelled):
        run(document, tmp_path / "parts", interrupted)
    assert [report.step for report in interrupted.of(StepReport)] == [1, 2, 3, 4, 5, 6]
    run(document, tmp_path / "parts", resumed := Recorder(), *interrupted.checkpoints())
    assert [report.step for report in resumed.of(StepReport)] == [5, 6, 7, 8, 9]
    assert resumed.losses() == whole.losses()[4:]
    assert any(event.type == "layer.demoted" for event in whole.of(EventReport))


def test_a_loss_that_stays_infinite_ends_the_run(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        trainer = make(with_training(spec_document, steps=300), tmp_path, mesh, recorder := Recorder())
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(torch.nan)
        with pytest.raises(NonFiniteLoss, match="up to step 10"):
            trainer.run()
    assert trainer.optimizer.num_skipped_steps == trainer.progress.step > 10
    assert recorder.of(StepReport)[0].loss is None


@pytest.mark.matrix
def test_a_job_that_diverges_fails_with_a_reason(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(spec_document, steps=60, optimizer={"learning_rate": 10.0}, gradient_clip=None)
    with pytest.raises(Diverged, match="learning_rate"):
        run(document, tmp_path, Recorder())


def test_samples_are_read_some_steps_late_or_when_somebody_asks() -> None:
    torch.manual_seed(0)
    events: list[LayerDemoted] = []
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    options = {"statistics_every": 100, "demotion": {"patience": 1, "min_sqnr_db": 60}, "on_event": events.append}
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), "O2", **options)

    def step() -> None:
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for _ in range(STEPS_LATE - 1):
        step()
        assert model.octet_report.health.samples == []
    step()
    assert {sample.step for sample in model.octet_report.health.samples} == {0}
    assert {event.step for event in events} == {STEPS_LATE}

    model, optimizer = initialize(
        model := torch.nn.Sequential(torch.nn.Linear(64, 64)), torch.optim.AdamW(model.parameters()), "O2", **options
    )
    step()
    assert len(fp8_statistics(model)) == 3


def stop_one_of_two(rank: int, port: int, document: dict[str, Any], folder: str) -> None:
    """Rank 1 is told to stop at its fourth step. Writes how each rank ended."""
    torch.set_num_threads(1)
    env = RankEnv(rank=rank, world_size=2, master_port=port)
    config, recorder = resolve(JobSpec.model_validate(document), env), Recorder(stop_after_step=4 if rank else None)
    with cpu_as_accelerator(), Mesh(env, torch.device("cpu"), config.layout) as mesh:
        trainer = Trainer(config, mesh, recorder, Path(folder))
        with pytest.raises(Cancelled):
            trainer.run()
    found = {"step": trainer.progress.step, "reported": [report.step for report in recorder.of(StepReport)]}
    torch.save(found, Path(folder, f"{rank}.pt"))


@pytest.mark.matrix
def test_ranks_stop_at_the_same_step(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(spec_document, "O2", steps=1000) | {"resources": {"workers": 2}}
    run_ranks(stop_one_of_two, (free_port(), document, str(tmp_path)), 2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert 4 <= first["step"] == second["step"] < 1000
    assert first["reported"] == list(range(1, first["step"] + 1))

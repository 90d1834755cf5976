"""On an accelerator the host waits for no value in a step, and what is read late is all there: every step, once, in order.

The CPU behaves as an accelerator here. The optimizer takes its kernels' path, in Triton's interpreter.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from octet.api_schemas import EventReport, JobSpec, PhaseReport, StepReport
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.worker import fp8_statistics, initialize
from octet.worker.common.config import RankEnv, resolve
from octet.worker.common.errors import Cancelled, Diverged, NonFiniteLoss
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.fp8.health import STEPS_LATE, LayerDemoted
from octet.worker.mesh import Axis, Mesh, Pending
from octet.worker.metrics.readback import HostCopy
from octet.worker.models import build_model
from octet.worker.parallel.data_parallel import GradientBuckets
from octet.worker.train.log import StepLog
from octet.worker.train.loop import Trainer
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.tape import WAITING_OPS, optimizer_by_kernels
from tests.kit.training import Recorder, with_training
from tests.worker.models.test_architectures import CONFIGS, batch_of

pytestmark = pytest.mark.usefixtures("accelerator")
WAITING_METHODS = {"tolist", "item", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"}
MAKING_METHODS = {"tensor", "as_tensor", "asarray"}
"""Functions that make a tensor of the host's numbers."""
STARTING_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
run_backward = torch.autograd._engine_run_backward
IN_EVERY_RUN = {("O2", "nothing"), ("O2", "selective checkpointing")}
REFUSED = {(name, "fp16-amp") for name in ("fused loss", "gradient release", "tensor")} | {("tensor", "ao"), ("pipeline", "ao")}
"""Savings and divisions that a level refuses."""


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
    """Counts the methods of tensors that read values without an op, as `tolist` does, and copies from the host.

    A GPU's copy from memory that is not pinned waits for all work before it. Where the CPU is the accelerator, its device is
    a `torch.device`, and the host's is the string "cpu" or none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.on_host = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func in STARTING_BACKWARD:
            with mock.patch.object(torch.autograd, "_engine_run_backward", self.run_backward):
                return func(*args, **kwargs)
        is_copy = self.copies_from_host(name, args, kwargs)
        self.found.update([name] if name in WAITING_METHODS or is_copy else [])
        made = func(*args, **kwargs)
        if name in MAKING_METHODS and not is_copy:
            self.on_host[made] = True
        return made

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass whose hooks are seen: torch calls what it overrides without the mode."""
        with self:
            return run_backward(*args, **kwargs)

    def copies_from_host(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return True for a copy to the device from memory of the host that is not pinned."""
        names_device = any(isinstance(given, torch.device) for given in (*args, kwargs.get("device")))
        from_host, *_ = [isinstance(given, Tensor) and given in self.on_host for given in args] or [False]
        if name in MAKING_METHODS:
            return names_device and (from_host or not isinstance(args[0], Tensor))
        if name == "__setitem__" and isinstance(args[2], int | float):
            return args[0][args[1]].dim() == 0  # a wider place is filled, without a copy
        if name in ("__setitem__", "__getitem__"):
            return any(isinstance(at, list) for at in (args[1] if isinstance(args[1], tuple) else (args[1],)))
        if kwargs.get("non_blocking"):
            return False
        if name == "copy_":
            return args[1] in self.on_host and not from_host
        return name in ("new_tensor", "cuda") or (name == "to" and names_device and from_host)


@contextmanager
def reads_of_what_has_arrived_left_out() -> Iterator[None]:
    """Leave out the reads of copies on the host, which are made steps later; whatever else reads is counted."""
    read = HostCopy.read

    def read_unseen(copy: HostCopy) -> Any:
        with torch._C.DisableTorchFunction():
            return read(copy)

    with mock.patch.object(HostCopy, "read", read_unseen):
        yield


def make(document: dict[str, Any], folder: Path, mesh: Mesh, recorder: Recorder) -> Trainer:
    return Trainer(resolve(JobSpec.model_validate(document), RankEnv()), mesh, recorder, folder)


def run(document: dict[str, Any], folder: Path, recorder: Recorder, *checkpoints: Any) -> Any:
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        return make(document, folder, mesh, recorder).run(checkpoints)


SAVINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "full checkpointing": {"activation_checkpointing": "full"},
    "activations in FP8": {"saved_activations": "fp8"},
    "fused loss": {"fused_loss": True},
    "gradient release": {"gradient_release": True, "gradient_clip": None, "micro_batch_size": 2},
}
DIVISIONS: dict[str, dict[str, Any]] = {
    "data": {},
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}


def sampled_job(document: dict[str, Any], level: str, **training: Any) -> dict[str, Any]:
    """A job with two micro-batches, clipping, and statistics in every other step."""
    options = {"steps": 100, "global_batch_size": 2, "micro_batch_size": 1, "gradient_clip": 0.1, **training}
    document = with_training(document, level, **options)
    document["model"] = document["model"] | {"hidden_size": 16}
    if LEVELS[level].has_own_fp8:
        document["precision"] = {"level": level, "statistics_every": 2, "demotion": {"patience": 2}}
    return document


def waits_in_two_steps(make_trainer: Callable[[Recorder], Trainer]) -> tuple[dict[str, int], list[int]]:
    """Count the waits of two steps between reports, the last of them sampled. Returns them and the steps read later."""
    with optimizer_by_kernels(), reads_of_what_has_arrived_left_out():
        trainer = make_trainer(recorder := Recorder())
        trainer.step()
        trainer.log.num_steps = 100  # no report until then
        num_reported = len(recorder.of(StepReport))
        with WaitingMethods() as methods, WaitingOps() as ops:
            trainer.step()
            trainer.step()
        trainer.batches.close()
        assert len(recorder.of(StepReport)) == num_reported
        return dict(ops.found + methods.found), [step.step for step in trainer.log.flush().steps][-2:]


def is_refused(document: dict[str, Any]) -> bool:
    """Return True if the contract refuses a job. Other tests check its reasons."""
    try:
        resolve(JobSpec.model_validate(document), RankEnv(world_size=document.get("resources", {}).get("workers", 1)))
    except ValueError:
        return True
    return False


@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize(
    ("level", "saving"),
    [
        pytest.param(level, saving, marks=() if (level, saving) in IN_EVERY_RUN else pytest.mark.matrix)
        for level in LEVELS
        for saving in SAVINGS
    ],
)
def test_no_step_between_two_reports_waits(tmp_path: Path, spec_document: dict[str, Any], level: str, saving: str) -> None:
    """With accumulation, clipping, and statistics."""
    document = sampled_job(spec_document, level, **SAVINGS[saving])
    if is_refused(document):
        assert (saving, level) in REFUSED
        return
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        found, read = waits_in_two_steps(lambda recorder: make(document, tmp_path, mesh, recorder))
    assert (found, read) == ({}, [2, 3])


def count_on_two_ranks(rank: int, port: int, document: dict[str, Any], folder: str) -> None:
    torch.set_num_threads(1)
    env = RankEnv(rank=rank, world_size=2, master_port=port)
    config = resolve(JobSpec.model_validate(document), env)
    with cpu_as_accelerator(), Mesh(env, torch.device("cpu"), config.layout) as mesh:
        found = waits_in_two_steps(lambda recorder: Trainer(config, mesh, recorder, Path(folder)))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_no_step_of_several_ranks_waits_for_values(
    tmp_path: Path, spec_document: dict[str, Any], level: str, division: str
) -> None:
    """No host waits for values of its device. It does wait for other ranks in gloo's collectives, though not in NCCL's."""
    document = sampled_job(spec_document, level, global_batch_size=4)
    document["model"] = document["model"] | {"hidden_size": 32, "num_layers": 2}
    document |= {"resources": {"workers": 2}, "parallelism": DIVISIONS[division]}
    if is_refused(document):
        assert (division, level) in REFUSED
        return
    run_ranks(count_on_two_ranks, (free_port(), document, str(tmp_path)), 2)
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [{}, [2, 3]]


KNOWN_TO_WAIT = {"opt": "which makes a mask of ones for itself, and looks whether it is one"}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # transformers' DeBERTa, when it is imported
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name in ("llama", "deberta-v2") else pytest.mark.matrix)
        for name in CONFIGS
        if name not in KNOWN_TO_WAIT
    ],
)
def test_no_pass_of_a_network_of_transformers_waits(architecture: str) -> None:
    spec = HuggingFaceSpec(family="huggingface", architecture=architecture, config=CONFIGS[architecture])
    model, _ = initialize(build_model(spec, 0), None, "bf16-amp")
    batch = batch_of(architecture)
    with WaitingMethods() as methods, WaitingOps() as ops:
        model.loss(batch).loss.backward()
    assert (ops.found, methods.found) == (Counter(), Counter())


def test_waits_are_seen() -> None:
    with WaitingMethods() as methods, WaitingOps() as ops:
        value = torch.ones(1).sum()
        float(value)
        value.tolist()
        assert value
    assert ops.found["_local_scalar_dense"] == 2
    assert methods.found["tolist"] == 1


def test_copies_from_the_host_are_seen() -> None:
    device = torch.device("cpu")
    with WaitingMethods() as methods:
        on_host, on_device = torch.tensor([1.0, 2.0]), torch.zeros(2, device=device)
        torch.tensor([1.0], device=device)
        torch.as_tensor(on_host, device=device)
        on_host.to(device)
        on_device.copy_(on_host)
        on_device[0] = 1.0
        on_device[[0, 1]] += 1.0
        on_device.new_tensor([1.0])
    assert methods.found == {
        "tensor": 1, "as_tensor": 1, "to": 1, "copy_": 1, "__setitem__": 2, "__getitem__": 1, "new_tensor": 1
    }  # fmt: skip
    with WaitingMethods() as methods:
        on_host.to(device, non_blocking=True)
        on_host.to(torch.bfloat16)
        on_device.to(device)
        on_device[:1] = 1.0
        on_device[0].zero_()
        on_device[0] = on_device[1]
        torch.full((2,), 1.0, device=device)
    assert methods.found == {}


class AloneWithItself(Axis):
    """An axis of two ranks. The other one sends what this one sends."""

    def start_exchange(self, parts_RS: Tensor) -> Pending:
        return Pending(torch.stack([parts_RS[0], parts_RS[0]]))

    def start_gather(self, own_S: Tensor, into_RS: Tensor | None = None) -> Pending:
        return Pending(torch.stack([own_S, own_S]))


@pytest.mark.parametrize("has_all", [True, False])
def test_an_exchange_of_gradients_copies_nothing_from_the_host(has_all: bool) -> None:
    """Its hooks run in the backward pass. Without a gradient of its own a rank reads, at the end, if another one has some."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    buckets = GradientBuckets(model, AloneWithItself("data", 2, 0, torch.device("cpu")), max_elements=40)
    loss = (model if has_all else model[0])(torch.ones(2, 4)).sum()
    with WaitingMethods() as methods:
        loss.backward()
        buckets.finish()
    assert methods.found == ({} if has_all else {"tolist": 1})
    assert (model[1].weight.grad is None) == (not has_all)


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
    """Stop rank 1 at its fourth step. Saves how each rank ended."""
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

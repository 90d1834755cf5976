"""A device copies a checkpoint while it computes the next step, and changes nothing before it is copied.

Here the CPU copies as late as CUDA may: when `hold_back` is called. Copies that the device's stream has queued may run until
then. So a change that a step makes too early shows up in the checkpoint.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from octet.api_schemas import JobSpec
from octet.worker.checkpoint import host_copies
from octet.worker.checkpoint.host_copies import Copy, HostCopies
from octet.worker.common.config import RankEnv, resolve
from octet.worker.mesh import Mesh
from octet.worker.train.loop import Trainer
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.training import Recorder, train, with_training
from tests.kit.waiting import LONG_S

LEVELS = ("bf16-amp", "O2", "O3-split")
SAVINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "gradient release": {"gradient_release": True, "gradient_clip": None},
    "accumulation": {"micro_batch_size": 1},
}
SMALL_BYTES = 256
"""The threshold here; in models this small, each weight is still larger."""


class FakeCuda:
    """A stand-in for torch.cuda and for pinned memory. It records the calls in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.present = "steps"

    def Stream(self, _device: object) -> "FakeStream":
        return FakeStream(self, "side")

    def current_stream(self, _device: object) -> "FakeStream":
        return FakeStream(self, self.present)

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        self.present, before = stream.name, self.present
        yield
        self.present = before

    def Event(self) -> "FakeStream":
        return FakeStream(self, "host")


class FakeStream:
    """A stream, or an event."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: "FakeStream") -> None:
        self.cuda.told.append(f"{self.name} waits for {other.name}")

    def wait_event(self, _event: object) -> None:
        self.cuda.told.append(f"{self.name} waits for the event")

    def record(self, stream: "FakeStream") -> None:
        self.cuda.told.append(f"event in {stream.name}")

    def synchronize(self) -> None:
        self.cuda.told.append(f"{self.name} waits for the event")


class CudaTensor:
    """A tensor of a GPU, as far as copies look at it."""

    is_cuda, device = True, "cuda"

    def __init__(self, cuda: FakeCuda, num_bytes: int) -> None:
        self.shape, self.dtype, self.nbytes = (num_bytes,), torch.uint8, num_bytes

    def detach(self) -> "CudaTensor":
        return self


class PinnedMemory:
    """Memory of the host."""

    def __init__(self, cuda: FakeCuda, shape: tuple[int, ...], dtype: torch.dtype, pin_memory: bool) -> None:
        self.cuda, self.shape, self.dtype = cuda, shape, dtype
        cuda.told.append(f"memory, {'pinned' if pin_memory else 'not pinned'}")

    def copy_(self, tensor: CudaTensor, non_blocking: bool = False) -> None:
        waits = "" if non_blocking else ", and the host waits"
        self.cuda.told.append(f"{tensor.nbytes} bytes in {self.cuda.present}{waits}")


def test_on_cuda_the_host_waits_for_nothing_and_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked by the calls to torch.cuda, as no GPU is here. Only the writing thread waits, in `wait`."""
    cuda = FakeCuda()
    large = host_copies.SMALL_BYTES + 1
    tensors: Any = {"weight": CudaTensor(cuda, large), "amaxes": CudaTensor(cuda, 16), "moments": CudaTensor(cuda, 2 * large)}
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(host_copies.torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(host_copies.torch, "empty", lambda shape, **options: PinnedMemory(cuda, shape, **options))
    copies = HostCopies()
    order = [
        "16 bytes in steps",
        "side waits for steps",
        f"{large} bytes in side",
        f"{2 * large} bytes in side",
        "event in side",
    ]
    held = copies.take(tensors)
    assert cuda.told == ["memory, pinned"] * 3 + order
    cuda.told.clear()
    copies.hold_back()
    copies.hold_back()  # of the second of two steps
    assert cuda.told == ["steps waits for the event"]
    cuda.told.clear()
    copies.wait()
    assert cuda.told == ["host waits for the event"]
    cuda.told.clear()
    again = copies.take(tensors)
    assert cuda.told == order
    assert all(again[path] is held[path] for path in tensors)


class Latest:
    """A stream that copies when it may not wait any longer."""

    num_late = 0

    def __init__(self) -> None:
        self._copies: list[Copy] = []
        self._made = threading.Event()

    def start(self, copies: list[Copy]) -> None:
        self._copies = list(copies)
        self._made.clear()

    def hold_back(self) -> None:
        for host, tensor in self._copies:
            host.copy_(tensor)
        Latest.num_late += len(self._copies)
        self._copies = []
        self._made.set()

    def wait(self) -> None:
        assert self._made.wait(LONG_S)


def copy_late() -> Any:
    Latest.num_late = 0
    return mock.patch.multiple(host_copies, stream_of=lambda _: Latest(), SMALL_BYTES=SMALL_BYTES)


def files_of(folder: Path) -> dict[str, bytes]:
    """The tensors of the checkpoints, which depend on nothing but the run."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def document_of(document: dict[str, Any], level: str, saving: str) -> dict[str, Any]:
    options = {"steps": 5, "checkpoint_every": 2, "global_batch_size": 2, **SAVINGS[saving]}
    return with_training(document, level, **options)


@pytest.mark.parametrize("saving", SAVINGS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_changes_nothing_before_it_is_copied(
    tmp_path: Path, spec_document: dict[str, Any], level: str, saving: str
) -> None:
    document = document_of(spec_document, level, saving)
    train(document, tmp_path / "at_once")
    with copy_late():
        train(document, tmp_path / "late")
    assert Latest.num_late > 0
    expected = files_of(tmp_path / "at_once")
    assert len(expected) == 3
    assert files_of(tmp_path / "late") == expected


class Remembering(nn.Module):
    """Each pass in training writes into a buffer, as momentum contrast does with its queue (arXiv 1911.05722)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.register_buffer("queue", torch.zeros(32, 32))

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.body(self.embedding(batch["tokens"]))
        if self.training:
            self.queue.copy_(self.queue.roll(1, 0) + hidden.detach()[0, :32])
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), batch["targets"].flatten())


def test_no_pass_changes_a_buffer_before_it_is_copied(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = document_of(spec_document, "O3-split", "nothing") | {"model": {"entrypoint": f"{__name__}:Remembering"}}
    train(document, tmp_path / "at_once")
    with copy_late():
        train(document, tmp_path / "late")
    assert Latest.num_late > 0
    assert files_of(tmp_path / "late") == files_of(tmp_path / "at_once")


def train_two_ranks(rank: int, port: int, document: dict[str, Any], folder: str, is_late: bool) -> None:
    torch.set_num_threads(1)
    env = RankEnv(rank=rank, world_size=2, master_port=port)
    config = resolve(JobSpec.model_validate(document), env)
    with copy_late() if is_late else mock.patch.object(host_copies, "SMALL_BYTES", SMALL_BYTES):
        with Mesh(env, torch.device("cpu"), config.layout) as mesh:
            Trainer(config, mesh, Recorder(), Path(folder)).run()
        assert Latest.num_late > 0 or not is_late


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_no_rank_changes_its_pieces_before_they_are_copied(
    tmp_path: Path, spec_document: dict[str, Any], level: str, stage: int
) -> None:
    document = document_of(spec_document, level, "nothing")
    document |= {"resources": {"workers": 2}, "parallelism": {"zero_stage": stage}}
    for name in ("at_once", "late"):
        run_ranks(train_two_ranks, (free_port(), document, str(tmp_path / name), name == "late"), 2)
    expected = files_of(tmp_path / "at_once")
    assert len(expected) == 9  # the whole tensors and the pieces of two ranks, three times
    assert files_of(tmp_path / "late") == expected

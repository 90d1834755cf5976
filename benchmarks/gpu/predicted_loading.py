"""Predict the peak while a model of 8 B parameters is read from a folder: rows of `predicted_memory.py`.

What runs is what a job runs (`worker/pretrained/start.py`): the network on `meta`, an optimizer that follows it, and
`FileSource`, which gives each weight its values right before it is converted. The files are shapes alone, in bf16 and on the
host, where they are mapped.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.predicted_savings import CARD_BYTES, GIB, LARGE_LEVELS
from benchmarks.gpu.report import Row
from octet.api_schemas import OptimizerSpec
from octet.api_schemas.models import PRESETS
from octet.api_schemas.models.llama import LlamaSizes
from octet.api_schemas.precision import PrecisionSpec
from octet.worker.models.initial import parameters_on_meta
from octet.worker.models.llama import Llama
from octet.worker.optim import build_optimizer
from octet.worker.optim.schedule import parameter_groups
from octet.worker.planning.fake_gpu import DEVICE_TYPE, fake_gpu, see_within
from octet.worker.planning.live_bytes import LiveBytes
from octet.worker.prepare.initialize import prepare
from octet.worker.pretrained.files import PretrainedFiles
from octet.worker.pretrained.layouts import layout_in_file
from octet.worker.pretrained.load import FileSource

FILE_DTYPE = torch.bfloat16
NUM_TOKENS = 2048


class Shapes(PretrainedFiles):
    """Stands for a folder with a model's weights: it knows their shapes, and reads tensors without values."""

    def __init__(self, model: Llama) -> None:
        self.config: dict[str, Any] = {"model_type": "llama"}
        layout = layout_in_file(model, self.config)
        named = model.named_parameters()
        self._shapes = {layout.rename(name): tuple(layout.to_file(name, weight).shape) for name, weight in named}

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def dequant_scale(self, name: str, index: int | None = None) -> Tensor | None:
        """Return None: no weight is FP8."""
        return None

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor on the CPU without values. index: of a matrix in a stack."""
        return torch.empty(self._shapes[name][0 if index is None else 1 :], dtype=FILE_DTYPE)


@dataclass(frozen=True)
class Loading:
    """Bytes on the device: at most while weights are read, when all of them are, and at most and at the end with states."""

    peak_of_weights: int
    weights: int
    peak: int
    held: int


class _Watched(FileSource):
    """Notes the bytes on the device when all weights are read."""

    live: LiveBytes
    seen: tuple[int, int]

    def finish(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Read the rest, then note the peak and what is alive."""
        super().finish(model, optimizer)
        self.seen = self.live.peak_bytes, self.live.num_bytes


def loading_rows(smoke: bool) -> Iterator[Row]:
    """Yield the peak of loading at each level, against 80 GB, and what stays."""
    sizes = PRESETS["llama-tiny" if smoke else "llama-8b"]
    assert isinstance(sizes, LlamaSizes)
    for level in LARGE_LEVELS:
        gc.collect()
        with fake_gpu() as device, LiveBytes(see_within=see_within, device_type=DEVICE_TYPE) as live:
            found = load(sizes, level, device, live)
        fits = "fits" if found.peak <= CARD_BYTES else "does not fit"
        yield Row(
            f"Llama {'tiny' if smoke else '8 B'} is read from files in bf16, {level}",
            _gib(found.peak),
            f"80 GB ({_gib(CARD_BYTES)})",
            found.peak / CARD_BYTES,
            None,
            f"{fits}. While weights are read at most {_gib(found.peak_of_weights)}, {_gib(found.weights)} when they all are; "
            f"{_gib(found.held)} stay with the optimizer's states",
        )


def load(sizes: LlamaSizes, level: str, device: torch.device, live: LiveBytes) -> Loading:
    """Read a Llama at a level to a device, inside the context of `live`, and return what it counted."""
    with parameters_on_meta():
        model = Llama(sizes)
    spec = OptimizerSpec()
    optimizer = build_optimizer(parameter_groups(model, spec), spec)
    source = _Watched(Shapes(model), model, device)
    source.live = live
    precision = PrecisionSpec.model_validate({"level": level, "statistics_every": 0})
    prepared = prepare(model, optimizer, precision, tokens=NUM_TOKENS, source=source)
    source.make_masters(prepared.model, prepared.optimizer)
    return Loading(*source.seen, live.peak_bytes, live.num_bytes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"

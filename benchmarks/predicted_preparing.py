"""Predict what a rank holds at most while a job of GPT-175B is prepared. Nothing is computed, and no other rank exists.

    python -m benchmarks.predicted_preparing [--out FOLDER]

What runs is what a job runs: the model without memory, `prepare`, ZeRO 3, and `materialize`, on fake tensors, as the first of
the ranks of torch's fake process group. Some blocks are counted; each further one adds their difference.
"""

import argparse
import gc
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from api_schemas import OptimizerSpec
from api_schemas.models.gpt import GPTSizes
from api_schemas.precision import PrecisionSpec
from benchmarks.gpu.fake_gpu import fake_tensors
from benchmarks.live_storages import LiveStorages
from benchmarks.scaling import GPT_175B, RESULTS, table
from benchmarks.wire_bytes import _first_of, _HostReads, encoded_whole
from worker import memory_report
from worker.mesh import Axis
from worker.models.gpt import GPT
from worker.models.meta import parameters_on_meta
from worker.optim import LowBitOptimizer, build_optimizer
from worker.optim.schedule import parameter_groups
from worker.parallel import Parallel
from worker.parallel.axes import Axes
from worker.parallel.materialize import Unfilled, materialize
from worker.prepare import prepare
from worker.pretrained.values import DrawnValues

COUNTED_LAYERS = (2, 3)
LEVELS, RANKS = ("O2",), (64, 128)
CPU = torch.device("cpu")


class Bytes(NamedTuple):
    """What a rank holds when a job is prepared, and at most before that."""

    held: float
    peak: float


class Shapes(DrawnValues):
    """Stands for the values of a model, of which it has the shapes."""

    def read(self, parameter: Unfilled) -> Tensor:
        """Return a whole parameter without values."""
        return torch.empty(parameter.shape)

    def skip(self, parameter: Unfilled) -> None:
        """Draw nothing."""


def in_pieces(sizes: GPTSizes, level: str, num_ranks: int) -> Bytes:
    """Prepare a job of a model at ZeRO 3 as its first rank does."""
    gc.collect()
    with _first_of(num_ranks), fake_tensors(), _HostReads(), LiveStorages() as live:
        with parameters_on_meta():
            model = GPT(sizes)
        values = Shapes(model, 0, CPU)
        spec = OptimizerSpec()
        precision = PrecisionSpec.model_validate({"level": level, "statistics_every": 0})
        prepared = prepare(model, build_optimizer(parameter_groups(model, spec), spec), precision, source=values)
        assert isinstance(prepared.optimizer, LowBitOptimizer)
        axes = Axes.of_data(Axis("data", num_ranks, 0, CPU))
        parallel = Parallel(prepared.model, prepared.optimizer, axes, zero_stage=3)
        materialize(prepared.model, prepared.optimizer, parallel, values, axes.replicas)
        return Bytes(sum(memory_report(prepared.model, prepared.optimizer).values()), live.peak_bytes)


def whole(sizes: GPTSizes, level: str) -> Bytes:
    """Prepare a job whose model every rank makes whole, up to where the ranks divide it."""
    gc.collect()
    with fake_tensors(), _HostReads(), encoded_whole(), LiveStorages() as live:
        with mock.patch("worker.models.gpt.draw_parameters"):
            model = GPT(sizes)
        spec = OptimizerSpec()
        precision = PrecisionSpec.model_validate({"level": level, "statistics_every": 0})
        prepared = prepare(model, build_optimizer(parameter_groups(model, spec), spec), precision)
        return Bytes(sum(memory_report(prepared.model, prepared.optimizer).values()), live.peak_bytes)


def extrapolated(first: Bytes, second: Bytes, num_layers: int) -> Bytes:
    """What a model of so many layers holds, given those of COUNTED_LAYERS."""
    num_more = (num_layers - COUNTED_LAYERS[0]) / (COUNTED_LAYERS[1] - COUNTED_LAYERS[0])
    return Bytes(*(one + num_more * (other - one) for one, other in zip(first, second, strict=True)))


def rows(sizes: GPTSizes) -> list[tuple[str, ...]]:
    """A row for each level, made whole and in pieces."""
    counted = [sizes.model_copy(update={"num_layers": num_layers}) for num_layers in COUNTED_LAYERS]
    found = []
    for level in LEVELS:
        made = {"whole": extrapolated(*(whole(each, level) for each in counted), sizes.num_layers)}
        for num_ranks in RANKS:
            made[str(num_ranks)] = extrapolated(*(in_pieces(each, level, num_ranks) for each in counted), sizes.num_layers)
        found += [(level, kind, f"{held / 1e9:,.1f}", f"{peak / 1e9:,.1f}") for kind, (held, peak) in made.items()]
    return found


def report(sizes: GPTSizes, command: str) -> str:
    """The whole document."""
    largest = 4 * sizes.hidden_size * max(4 * sizes.hidden_size, sizes.vocab_size) * 4
    lines = [
        f"# Preparing GPT-175B at ZeRO 3, predicted, {datetime.now(UTC):%Y-%m-%d}",
        f"`{command}`, torch {torch.__version__}, Python {platform.python_version()}. No GPU was used, and no second process. "
        f"Bytes of live storages on fake tensors, counted at {COUNTED_LAYERS[0]} and {COUNTED_LAYERS[1]} blocks of "
        f"{sizes.num_layers}. Embeddings, head and last norm are whole on every rank. The largest parameter in fp32 has "
        f"{largest / 4 / 1e9:.1f} GB. Gradients and activations are not there yet.",
        *table("level, ranks, held when prepared (GB of a rank), at most while it is prepared (GB)", rows(sizes)),
    ]
    return "\n".join(line if line.startswith("|") else f"\n{line}\n" for line in lines).strip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table")
    options = parser.parse_args()
    text = report(GPT_175B, "python -m benchmarks.predicted_preparing")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{datetime.now(UTC):%Y-%m-%d}-preparing.md").write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

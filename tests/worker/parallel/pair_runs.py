"""Pairs of strategies on four ranks: what each rank finds out in a pair, for `test_pairs.py` to compare with one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octet.api_schemas import Layout
from octet.worker.common.config import RankEnv
from octet.worker.mesh import Axes, Mesh
from tests.worker.parallel.context_runs import of_documents, own_loop
from tests.worker.parallel.job_runs import jobs
from tests.worker.parallel.tensor_runs import Case, Result, converted, draws, evaluated, gradients, poisoned, resumed, trained

NUM_RANKS = 4
NUM_WORLDS = 4
"""Process groups that a pair may need one after the other: of the mesh, of two jobs, of somebody's own loop."""


@dataclass(frozen=True)
class Pair:
    """Two strategies on four ranks. degrees: of the layout, and of a job; the other ranks are data ranks.

    sequence: tensor ranks also divide tokens. gradients_of: families whose gradients on the pair's layout are compared.
    documents: these are of rows with several documents. four: families whose gradients on four ranks of the one degree are
    compared. converted: levels whose shards are put together. poisoned: ZeRO stages of a step with a NaN in one shard.
    resumed: levels and ZeRO stages of a run that goes on from a checkpoint. draws, evaluated, jobs, own_loop: these are found.
    """

    degrees: Mapping[str, int]
    sequence: bool = False
    gradients_of: tuple[str, ...] = ()
    documents: bool = False
    four: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    poisoned: tuple[int, ...] = ()
    resumed: tuple[tuple[str, int], ...] = ()
    draws: bool = False
    evaluated: bool = False
    jobs: bool = True
    own_loop: bool = False
    fast: frozenset[tuple[Any, ...]] = field(default_factory=frozenset)
    """Cases of the default run, with which gradients are compared, too."""

    @property
    def layout(self) -> Layout:
        return Layout(NUM_RANKS, **self.degrees)

    @property
    def tensor(self) -> bool:
        """True if ranks divide layers: ranks of one tensor group have one loss."""
        return "tensor" in self.degrees

    def batch(self) -> dict[str, Tensor] | None:
        """Return the batch of gradients; None for each data rank's own."""
        return of_documents() if self.documents else None


PAIRS: dict[str, Pair] = {
    "tensor data": Pair(
        {"tensor": 2},
        gradients_of=("gpt", "llama"),
        four=("gpt",),
        converted=("O3", "O3-split"),
        poisoned=(0, 1),
        resumed=(("O3", 1), ("O3-split", 0)),
    ),
    "sequence data": Pair({"tensor": 2}, sequence=True, four=("gpt",)),
    "context data": Pair({"context": 2}, documents=True, four=("gpt", "llama")),
    "context tensor": Pair(
        {"tensor": 2, "context": 2},
        gradients_of=("llama",),
        documents=True,
        poisoned=(1,),
        resumed=(("O3-split", 1),),
        draws=True,
        evaluated=True,
        jobs=False,
    ),
    "context sequence": Pair(
        {"tensor": 2, "context": 2},
        sequence=True,
        gradients_of=("llama",),
        documents=True,
        own_loop=True,
        fast=frozenset({("gpt", "O3", 1)}),
    ),
}


def work(rank: int, ports: list[int], folder: str, wanted: tuple[str, Sequence[Case], bool]) -> None:
    """Train the cases of a pair. wanted: the pair's name, its cases, and whether all else in the table is found, too."""
    torch.set_num_threads(1)
    name, cases, finds_all = wanted
    pair = PAIRS[name]
    found: Result = {}
    with Mesh(RankEnv(rank=rank, world_size=NUM_RANKS, master_port=ports[0]), torch.device("cpu"), pair.layout) as mesh:
        found |= {case: trained(mesh, *case, sequence=pair.sequence) for case in cases}
        found["gradients"] = {
            family: gradients(mesh, family, pair.batch(), sequence=pair.sequence) for family in pair.gradients_of
        }
        if finds_all:
            found |= _all_else(pair, rank, mesh, folder)
    if finds_all and pair.jobs:
        found["jobs"] = jobs(rank, ports[1:3], folder, **pair.degrees, sequence=pair.sequence)
    if finds_all and pair.own_loop:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[3]}", rank=rank, world_size=NUM_RANKS)
        found["own loop"] = own_loop(1, tensor=2, sequence=True)
        dist.destroy_process_group()
    torch.save(found, f"{folder}/{rank}.pt")


def _all_else(pair: Pair, rank: int, mesh: Mesh, folder: str) -> Result:
    """Find what the pair's layout shows, and four ranks of its one degree."""
    found: Result = {
        "converted": {level: converted(mesh, "gpt", level) for level in pair.converted},
        "poisoned": {stage: poisoned(mesh, stage) for stage in pair.poisoned},
        "resumed": {
            (level, stage): resumed(mesh, mesh.world, level, stage, Path(folder, f"{level} {stage}"))
            for level, stage in pair.resumed
        },
    }
    if pair.draws:
        found["draws"] = draws(mesh)
    if pair.evaluated:
        found["evaluated"] = evaluated(mesh, of_documents())
    if pair.four:
        (degree,) = pair.degrees
        axes = Axes.of_layout(Layout(NUM_RANKS, **{degree: NUM_RANKS}), rank, mesh.device)
        found["four"] = {family: gradients(axes, family, pair.batch(), sequence=pair.sequence) for family in pair.four}
    return found

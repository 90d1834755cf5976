"""Processes that stand for the ranks of a job."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing

PRELOADED = [
    "torch.distributed.tensor",
    "octet.worker.train.loop",
    "octet.worker.parallel",
    "octet.worker.parallel.pipeline.loop",
    "torch.nn.attention.bias",
    "tests.kit.training",
]
"""Modules that every rank would load otherwise, the first of them at its first step. None of them starts a thread."""


def run_ranks(work: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int) -> None:
    """Call `work(rank, *arguments)` in a process for each rank and wait. An error in one of them is raised here.

    They are forks of a server that has loaded what ranks use: it takes four seconds, and every rank would need them.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(work, arguments, nprocs=num_ranks, start_method="forkserver")


def saved_by_ranks(folder: Path, num_ranks: int) -> list[Any]:
    """Return what each rank has saved in the folder under its number."""
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def refusal_of(call: Callable[[], Any]) -> str:
    """Return the message of the ValueError that a call raises, in a rank that tells it to its test."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was refused"

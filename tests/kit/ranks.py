"""Processes that stand for the ranks of a job."""

import multiprocessing
from collections.abc import Callable
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

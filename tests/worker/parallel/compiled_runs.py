"""Jobs whose ranks compile the blocks of their model: what each rank finds out, for `test_compiled.py`."""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from octet.api_schemas import EventReport, JobSpec
from octet.worker.common.config import RankEnv, resolve
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.mesh import Mesh
from octet.worker.prepare import blocks
from octet.worker.train.loop import Trainer
from tests.kit.training import Recorder
from tests.worker.parallel.pipeline_runs import Result, port_of, run_job

Backend = str | Callable[..., Any]


def compiling_with(backend: Backend) -> Any:
    """Inside, jobs compile their blocks with a backend that needs no C++ compiler."""
    return patch.object(blocks, "compile_blocks", partial(blocks.compile_blocks, backend=backend))


def counted_job(job: dict[str, Any], env: RankEnv, folder: Path) -> Result:
    """Run a job with compiled blocks. Return the result of `run_job` and what this rank has compiled.

    Compiled: the number of graphs, the graph breaks, and the types of the compile watch's events.
    """
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    said: list[Any] = []
    after_step = blocks.CompileWatch.after_step

    def listened(watch: blocks.CompileWatch) -> Any:
        reports = after_step(watch)
        said.extend(reports)
        return reports

    with compiling_with("aot_eager"), patch.object(blocks.CompileWatch, "after_step", listened):
        found = run_job(job, env, folder)
    return found | {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
        "events": [report.type for report in said if isinstance(report, EventReport)],
    }


def work(rank: int, folder: str, jobs: list[str]) -> None:
    """Run the named jobs in the folder on all ranks, one after the other, those with "accelerator" in their name as there."""
    torch.set_num_threads(1)
    found = {}
    for name in jobs:
        job = json.loads(Path(folder, f"{name}.json").read_text())
        port = port_of(Path(folder, f"{name}.port"), rank)
        env = RankEnv(rank=rank, world_size=job["resources"]["workers"], master_port=port)
        with cpu_as_accelerator() if "accelerator" in name else nullcontext():
            found[name] = counted_job(job, env, Path(folder, name))
    torch.save(found, f"{folder}/{rank}.pt")


def rank_with_bad_compiler(rank: int, story: str, job: dict[str, Any], port: int, folder: str, timeout_s: float) -> None:
    """Run a rank of a job. The last rank `fails` or `hangs` while it compiles. Writes the rank's error to the folder."""
    torch.set_num_threads(1)
    num_ranks = job["resources"]["workers"]
    env = RankEnv(rank=rank, world_size=num_ranks, master_port=port)
    config = resolve(JobSpec.model_validate(job), env)

    def backend(graph: Any, _inputs: Any) -> Any:
        if rank < num_ranks - 1:
            return graph.forward
        if story == "fails":
            raise ZeroDivisionError("the compiler is bad")
        while True:
            time.sleep(0.001)

    try:
        with compiling_with(backend), Mesh(env, torch.device("cpu"), config.layout, timeout_s) as mesh:
            Trainer(config, mesh, Recorder(), Path(folder)).run()
    except Exception as error:  # noqa: BLE001  what it is, is what is tested
        ending = [type(error).__name__, getattr(error, "reason", None), str(error)]
        Path(folder, f"{rank}.json").write_text(json.dumps(ending))

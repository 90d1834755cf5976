"""Small language models whose sequences ranks of a context axis divide: what each rank finds out, for the tests to compare."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from api_schemas import JobSpec, Layout
from api_schemas.levels import LEVELS
from tests.golden.record import document as golden_job
from tests.worker.parallel.tensor_runs import (
    STEPS,
    Result,
    batch_of,
    checkpoint_ref,
    make,
    make_network,
    run_job,
    step_on_ranks,
)
from worker.config import RankEnv
from worker.mesh import Mesh
from worker.models.context import divide_sequences
from worker.parallel import Parallel
from worker.parallel.axes import Axes
from worker.prepare import share_rounding

CONTEXT_LEVELS = [name for name, level in LEVELS.items() if not level.loss_scaling and level.engine == "octet"]


def parallel_on(mesh: Mesh, family: str, level: str, zero_stage: int) -> Parallel:
    model, optimizer = make(family, level)
    share_rounding(model, mesh.replicas.rank, mesh.replicas.size)
    divide_sequences(model, mesh.context)
    return Parallel(model, optimizer, Axes.of_mesh(mesh), zero_stage=zero_stage)


def of_documents() -> dict[str, Tensor]:
    """A batch of several documents in a row, in which the second row has targets in its first chunk alone."""
    batch = batch_of(0, 0, 0)
    targets = batch["targets"].clone()
    targets[0, 5:9] = -100
    targets[1, 4:] = -100
    documents = torch.tensor([[0] * 3 + [1] * 13, [0] * 10 + [1] * 6])
    return batch | {"targets": targets, "documents": documents, "num_targets": (targets != -100).sum(1)}


def gradients(mesh: Mesh, family: str, batch: dict[str, Tensor]) -> Result:
    """The mean loss of the ranks, and fp32 gradients of one backward pass."""
    parallel = parallel_on(mesh, family, "fp32", 0)
    loss = parallel.model.loss(batch).loss
    loss.backward()
    parallel.gradients.finish()
    found = {name: parameter.grad for name, parameter in parallel.model.named_parameters()}
    return {"loss": mesh.replicas.sum(float(loss.detach()))[0] / mesh.replicas.size, "gradients": found}


def trained(mesh: Mesh, family: str, level: str, stage: int) -> Result:
    """Mean losses of the ranks, and norms, of some steps. All replicas of a group read the same batches."""
    parallel = parallel_on(mesh, family, level, stage)
    parallel.data = mesh.data  # by which `step_on_ranks` chooses the batch
    losses, norms = [], []
    for step in range(STEPS):
        loss, norm = step_on_ranks(parallel, step)
        losses.append(mesh.replicas.sum(loss)[0] / mesh.replicas.size)
        norms.append(norm)
        parallel.optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def evaluated(mesh: Mesh) -> list[float]:
    """Mean loss and accuracy over all ranks' targets, and their number."""
    model: Any = make_network("llama").eval()
    divide_sequences(model, mesh.context)
    with torch.no_grad():
        losses = model.loss(of_documents())
    sums = mesh.replicas.sum(*(float(value) * losses.num_targets for value in (losses.loss, losses.metrics["token_accuracy"])))
    (count,) = mesh.replicas.sum(losses.num_targets)
    return [*(total / count for total in sums), count]


def sent(mesh: Mesh) -> dict[tuple[str, str], int]:
    """Bytes that a rank sends over the context axis in one micro-batch."""
    parallel = parallel_on(mesh, "llama", "O2", 0)
    mesh.context.sent_bytes.clear()
    parallel.model.loss(batch_of(0, 0, 0)).loss.backward()
    return dict(mesh.context.sent_bytes)


def work_of_two(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    with Mesh(RankEnv(rank=rank, world_size=2, master_port=port), torch.device("cpu"), Layout(2, context=2)) as mesh:
        found: Result = {"gpt": gradients(mesh, "gpt", batch_of(0, 0, 0)), "O3": trained(mesh, "gpt", "O3", 1)}
        found |= {"llama": gradients(mesh, "llama", of_documents()), "evaluated": evaluated(mesh), "sent": sent(mesh)}
    torch.save(found, f"{folder}/{rank}.pt")


def job(corpus: Path, workers: int, context: int) -> JobSpec:
    document = golden_job({"level": "O3-split"}, corpus, workers)
    training = {"steps": 2, "micro_batch_size": 1, "checkpoint_every": 1, "schedule": {}, "activation_checkpointing": "full"}
    parallelism = {"context": context, "zero_stage": 1}
    return JobSpec.model_validate(document | {"parallelism": parallelism, "training": document["training"] | training})


def work(rank: int, ports: list[int], folder: str, cases: list[tuple[str, str, int]]) -> None:
    """Two context ranks with two data ranks, and four context ranks."""
    torch.set_num_threads(1)
    envs = [RankEnv(rank=rank, world_size=4, master_port=port) for port in ports]
    spec, job_folder = job(Path(folder, "corpus"), 4, 2), Path(folder, "job")
    first = run_job(spec, envs[0], job_folder)
    found: Result = {"jobs": [first, run_job(spec, envs[1], job_folder, (checkpoint_ref(job_folder / "checkpoints"),))]}
    with Mesh(envs[2], torch.device("cpu"), Layout(4, context=2)) as mesh:
        found |= {case: trained(mesh, *case) for case in cases}
    with Mesh(envs[3], torch.device("cpu"), Layout(4, context=4)) as mesh:
        found |= {name: gradients(mesh, name, of_documents()) for name in ("gpt", "llama")}
    torch.save(found, f"{folder}/{rank}.pt")

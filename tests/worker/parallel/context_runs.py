"""Small language models whose sequences ranks of a context axis divide: what each rank finds out, for the tests to compare."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from octet.api_schemas import Layout
from octet.worker import parallelize
from octet.worker.common.config import RankEnv
from octet.worker.mesh import Axis, Mesh
from octet.worker.mesh.axes import Axes
from octet.worker.models.context import ContextPart
from octet.worker.models.cross_entropy import cross_entropy
from octet.worker.models.documents import document_spans
from tests.worker.parallel.tensor_runs import (
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    Case,
    Result,
    batch_of,
    evaluated,
    gradients,
    make,
    parallel_on,
    trained,
)

OWN_STEPS, MAX_NORM = 2, 0.5


def of_documents() -> dict[str, Tensor]:
    """A batch of several documents in a row, in which the second row has targets in its first chunk alone."""
    batch = batch_of(0, 0, 0)
    targets = batch["targets"].clone()
    targets[0, 5:9] = -100
    targets[1, 4:] = -100
    documents = torch.tensor([[0, 3], [0, 10]], dtype=torch.int32)
    return batch | {"targets": targets, "documents": documents, "num_targets": (targets != -100).sum(1)}


def sent(axes: Axes) -> dict[tuple[str, str], int]:
    """Bytes that a rank sends over the context axis in one micro-batch."""
    parallel = parallel_on(axes, "llama", "O2", 0)
    axes.context.sent_bytes.clear()
    parallel.model.loss(batch_of(0, 0, 0)).loss.backward()
    return dict(axes.context.sent_bytes)


GROUPED = {"B": 1, "query heads": 8, "key heads": 2, "tokens": 256, "head size": 16}


def kept_by_attention(axis: Axis, has_documents: bool) -> dict[str, int]:
    """Bytes of the storages that attention keeps for its backward pass, and those that it sends both ways."""
    own, size = GROUPED["tokens"] // axis.size, GROUPED["head size"]
    query = torch.randn(1, GROUPED["query heads"], own, size, requires_grad=True)
    key, value = (torch.randn(1, GROUPED["key heads"], own, size, requires_grad=True) for _ in range(2))
    part = ContextPart(axis)
    documents = torch.tensor([[0, GROUPED["tokens"] // 3]], dtype=torch.int32)
    spans = document_spans(documents, part.ranges(GROUPED["tokens"])) if has_documents else None
    axis.sent_bytes.clear()
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        mixed = part.attend(query, key, value, spans)
    given = {each.data_ptr() for each in (query, key, value)}
    own_bytes = sum(num_bytes for pointer, num_bytes in kept.items() if pointer not in given)
    mixed.sum().backward()
    return {"kept": own_bytes, "sent": sum(axis.sent_bytes.values())}


def own_loop(zero_stage: int, **degrees: Any) -> Result:
    """Losses and norms of somebody's own loop, whose ranks divide each sequence; losses of whole logits, where it has them."""
    model, optimizer = make("gpt", "O3")
    parallel = parallelize(model, optimizer, zero_stage=zero_stage, context=2, **degrees)
    losses, norms = [], []
    for step in range(OWN_STEPS):
        batch = batch_of(parallel.data.rank, step, 0)
        if degrees:
            loss = model.loss(batch).loss
        else:
            loss = cross_entropy(model(batch["tokens"]).flatten(0, 1), parallel.own_tokens(batch["targets"]).flatten())
        loss.backward()
        norms.append(float(parallel.clip_grad_norm_(MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "data": (parallel.data.rank, parallel.data.size)}


def check_own_loop(ranks: Sequence[Result]) -> None:
    """The mean of the ranks' losses, and the norm, are those of one process."""
    model, optimizer = make("gpt", "O3")
    losses, norms = [], []
    for step in range(OWN_STEPS):
        loss = model.loss(batch_of(0, step, 0)).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    means = [sum(of_ranks) / len(ranks) for of_ranks in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert means == pytest.approx(losses, rel=LOSS_TOLERANCE["fp8"])
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"] == pytest.approx(norms, rel=NORM_TOLERANCE["fp8"])
        assert rank["data"] == (0, 1)


def work_of_two(rank: int, ports: list[int], folder: str, _cases: list[Case]) -> None:
    """Two context ranks in a job, and in somebody's own loop."""
    torch.set_num_threads(1)
    with Mesh(RankEnv(rank=rank, world_size=2, master_port=ports[0]), torch.device("cpu"), Layout(2, context=2)) as mesh:
        axes = mesh
        found: Result = {"gpt": gradients(axes, "gpt"), "llama": gradients(axes, "llama", of_documents())}
        found |= {"O3": trained(axes, "gpt", "O3", 1), "evaluated": evaluated(axes, of_documents()), "sent": sent(axes)}
        found["kept"] = {packed: kept_by_attention(axes.context, packed) for packed in (False, True)}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[1]}", rank=rank, world_size=2)
    found["own"] = {zero_stage: own_loop(zero_stage) for zero_stage in (0, 2)}
    dist.destroy_process_group()
    torch.save(found, f"{folder}/{rank}.pt")

"""Small language models that ranks of a tensor and a context axis train: what each finds out, for tests to compare."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octet.api_schemas import GPTSizes, Layout
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models.llama import LlamaSizes
from octet.worker import checkpoint, initialize
from octet.worker.checkpoint.resume import resume
from octet.worker.common.config import RankEnv
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.fp8.weight import stored
from octet.worker.mesh import Axes, Axis, Mesh
from octet.worker.models.gpt import GPT
from octet.worker.models.llama import Llama
from octet.worker.parallel import Parallel
from octet.worker.parallel.strategies import divide
from octet.worker.prepare.convert import share_rounding
from tests.golden.record import digest
from tests.worker.parallel.job_runs import checkpoint_ref

STEPS, MICRO_BATCHES, MAX_NORM = 2, 2, 0.5
Result = dict[Any, Any]
Case = tuple[str, str, int]
"""A family, a level and a ZeRO stage."""
LOSS_TOLERANCE = {"fp32": 1e-6, "bf16": 2e-4, "fp8": 6e-4}
"""Relative, after two steps. A tensor shard adds partial sums: fp32 products differ in their last bit, and elsewhere a value
at the border of two codes may take the other one (measured over both families and all levels: 7e-8, 7e-5, 5e-4)."""
NORM_TOLERANCE = {"fp32": 1e-6, "bf16": 1e-3, "fp8": 6e-3}
"""Measured: 6e-7, 5e-4, 3e-3."""


def make_network(family: str) -> Any:
    if family == "gpt":
        sizes = GPTSizes(hidden_size=64, num_layers=1, num_heads=4, vocab_size=64, max_sequence_length=16)
        return GPT(sizes, seed=3)
    llama = LlamaSizes(
        hidden_size=64,
        intermediate_size=128,
        num_layers=1,
        num_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_sequence_length=16,
        rope_theta=10_000.0,
        tie_embeddings=False,
    )
    return Llama(llama, seed=3)


def make(family: str, level: str) -> tuple[Any, torch.optim.Optimizer]:
    network = make_network(family)
    options = {"statistics_every": 0} if LEVELS[level].has_own_fp8 else {}
    model, optimizer = initialize(network, torch.optim.AdamW(network.parameters(), lr=3e-3), level, **options)
    assert optimizer is not None
    return model, optimizer


def batch_of(share: int, step: int, micro_batch: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(1000 * share + 10 * step + micro_batch)
    tokens = torch.randint(64, (2, 17), generator=numbers)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def parallel_on(axes: Axes, family: str, level: str, zero_stage: int, *, sequence: bool = False) -> Parallel:
    model, optimizer = make(family, level)
    share_rounding(model, axes.replicas.rank, axes.replicas.size)
    parts = divide(model, optimizer, axes, sequence=sequence)
    return Parallel(model, optimizer, axes, zero_stage=zero_stage, parts=parts)


def step_on_ranks(parallel: Parallel, step: int) -> tuple[float, float]:
    """The rank's loss and the norm."""
    total = 0.0
    for micro_batch in range(MICRO_BATCHES):
        with parallel.no_sync(micro_batch < MICRO_BATCHES - 1):
            loss = parallel.model.loss(batch_of(parallel.data.rank, step, micro_batch)).loss / MICRO_BATCHES
            loss.backward()
        total += float(loss.detach())
    parallel.synchronize()
    norm = float(parallel.clip_grad_norm_(MAX_NORM))
    parallel.optimizer.step()
    parallel.publish()
    return total, norm


def reference(family: str, level: str, num_shares: int) -> tuple[list[float], list[float]]:
    """Losses and norms of one process on the batches of all data ranks."""
    model, optimizer = make(family, level)
    losses, norms = [], []
    for step in range(STEPS):
        parts = [
            model.loss(batch_of(share, step, part)).loss / MICRO_BATCHES / num_shares
            for part in range(MICRO_BATCHES)
            for share in range(num_shares)
        ]
        for part in parts:
            part.backward()
        losses.append(sum(float(part.detach()) for part in parts))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def trained(axes: Axes, family: str, level: str, stage: int, *, sequence: bool = False) -> Result:
    """Losses and norms of some steps, and what ranks must have alike afterwards."""
    parallel = parallel_on(axes, family, level, stage, sequence=sequence)
    numbers = []
    for step in range(STEPS):
        numbers.append(step_on_ranks(parallel, step))
        parallel.optimizer.zero_grad()
    layers = {name: layer for name, layer in parallel.model.named_modules() if isinstance(layer, Float8Linear)}
    scales = {name: layer.encoded.dequant_scale for name, layer in layers.items() if layer.encoded is not None}
    whole = {name: value for name, value in parallel.model.state_dict().items() if "norm" in name}
    return {"losses": [loss for loss, _ in numbers], "norms": [norm for _, norm in numbers], "scales": scales, "whole": whole}


def gradients(axes: Axes, family: str, batch: Mapping[str, Tensor] | None = None, *, sequence: bool = False) -> Result:
    """The mean loss of the ranks, and fp32 gradients of one backward pass, whole. batch: by default the data rank's."""
    parallel = parallel_on(axes, family, "fp32", 0, sequence=sequence)
    loss = parallel.model.loss(batch_of(parallel.data.rank, 0, 0) if batch is None else batch).loss
    loss.backward()
    parallel.gradients.finish()
    found = {}
    for name, parameter in parallel.model.named_parameters():
        assert parameter.grad is not None
        cut = parallel.shards.cuts.get(parameter)
        parts = axes.tensor.start_gather(parameter.grad).wait()
        found[name] = parts[0] if cut is None else cut.join(list(parts))
    return {"loss": axes.replicas.sum(float(loss.detach()))[0] / axes.replicas.size, "gradients": found}


def converted(axes: Axes, family: str, level: str) -> dict[str, bool]:
    """Return by name: True if the joined shards' codes, scales, residuals and master weights are the whole model's."""
    parallel, (model, optimizer) = parallel_on(axes, family, level, 0), make(family, level)
    equal = {}
    for name, whole in model.named_modules():
        if not isinstance(whole, Float8Linear):
            continue
        layer = parallel.model.get_submodule(name)
        cut = parallel.shards.cuts[layer.weight]
        own, expected = stored(layer.weight), stored(whole.weight)
        codes = cut.join(list(axes.tensor.start_gather(own.detach()).wait()))
        equal[name] = torch.equal(codes.view(torch.uint8), expected.detach().view(torch.uint8))
        if layer.encoded is not None:
            equal[f"{name} scale"] = torch.equal(layer.encoded.dequant_scale, whole.encoded.dequant_scale)
            if layer.encoded.residual is not None:
                residual = cut.join(list(axes.tensor.start_gather(layer.encoded.residual).wait()))
                equal[f"{name} residual"] = torch.equal(residual, whole.encoded.residual)
        if "master_weights" in parallel.optimizer.state[layer.weight]:
            master, of_whole = (
                held.state[of]["master_weights"] for held, of in ((parallel.optimizer, layer.weight), (optimizer, whole.weight))
            )
            codes = cut.join(list(axes.tensor.start_gather(master["codes"]).wait()))
            equal[f"{name} master"] = torch.equal(codes.view(-1), of_whole["codes"])
    return equal


def poisoned(axes: Axes, stage: int) -> Result:
    """A step in which one rank's shard has a NaN gradient: how many steps were skipped, and whether weights stayed."""
    parallel = parallel_on(axes, "gpt", "O3", stage)
    before = copy.deepcopy({name: value for name, value in parallel.model.state_dict().items() if "weight" in name})
    for micro_batch in range(MICRO_BATCHES):
        with parallel.no_sync(micro_batch < MICRO_BATCHES - 1):
            parallel.model.loss(batch_of(parallel.data.rank, 0, micro_batch)).loss.backward()
            weight = parallel.model.blocks[0].mlp.up.weight
            if micro_batch == 0 and axes.stage.rank == 1:
                weight.grad = Float8Gradient.quantize(torch.full(weight.shape, torch.nan), weight.grad.position)
    parallel.synchronize()
    parallel.optimizer.step()
    parallel.publish()
    after = parallel.model.state_dict()
    kept = all(torch.equal(_bytes(after[name]), _bytes(value)) for name, value in before.items())
    return {"skipped": parallel.optimizer.num_skipped_steps, "kept": kept}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def draws(axes: Axes) -> Result:
    """Return the positions of a shard, a whole parameter and a gradient in random streams."""
    parallel = parallel_on(axes, "gpt", "O3", 0)
    up, norm = parallel.model.blocks[0].mlp.up, parallel.model.final_norm.weight
    origins, position = parallel.optimizer.origins, up.gradient_position
    first = origins[up.weight].first_draw
    return {
        "shard": range(first, first + up.weight.numel()),
        "whole": origins[norm].first_draw,
        "gradient": (position.share, position.num_shares),
    }


def sent(axes: Axes, family: str = "gpt", level: str = "fp32", *, sequence: bool = False) -> dict[tuple[str, str], int]:
    """Bytes that a rank sends over the tensor axis for one micro-batch."""
    parallel = parallel_on(axes, family, level, 0, sequence=sequence)
    axes.tensor.sent_bytes.clear()
    parallel.model.loss(batch_of(0, 0, 0)).loss.backward()
    return dict(axes.tensor.sent_bytes)


def evaluated(axes: Axes, batch: Mapping[str, Tensor], *, sequence: bool = False) -> list[float]:
    """Mean loss and accuracy over the targets that count, and their number."""
    model = parallel_on(axes, "llama", "fp32", 0, sequence=sequence).model.eval()
    with torch.no_grad():
        losses = model.loss(batch)
    sums = axes.context.sum(*(float(value) * losses.num_targets for value in (losses.loss, losses.metrics["token_accuracy"])))
    (count,) = axes.context.sum(losses.num_targets)
    return [*(total / count for total in sums), count]


def partly_ignored() -> dict[str, Tensor]:
    batch = batch_of(0, 0, 0)
    targets = batch["targets"].clone()
    targets[0, :5] = -100
    counts = (targets != -100).sum(1)
    with torch.no_grad():  # half of the others are what the model says
        targets[1, :8] = make_network("llama").eval()(batch["tokens"])[1, :8].argmax(-1)
    return {"tokens": batch["tokens"], "targets": targets, "num_targets": counts}


def resumed(axes: Axes, world: Axis, level: str, stage: int, folder: Path) -> Result:
    """A run that was saved after a step: what was loaded at the same degree, and what it goes on with."""
    parallel = parallel_on(axes, "gpt", level, stage)
    step_on_ranks(parallel, 0)
    parallel.optimizer.zero_grad()
    model, optimizer = parallel.state_dicts()
    saved = checkpoint.save(folder, 1, {"model": model, "optimizer": optimizer}, world)
    world.sum(0.0)  # until the first rank has written the manifest
    ref = checkpoint_ref(folder)
    again = parallel_on(axes, "gpt", level, stage)
    state = checkpoint.load(folder, ref, axes.tensor)
    resume(again.model, again.optimizer, *again.own_part(state["model"], state["optimizer"]))
    from_whole = parallel_on(axes, "gpt", level, stage)
    state = checkpoint.load(folder, ref)
    resume(from_whole.model, from_whole.optimizer, *from_whole.own_part(state["model"], state["optimizer"]))
    states = [digest_of(run) for run in (parallel, again)]
    codes = [digest({"model": exact_state_dict(run.model)}) for run in (parallel, from_whole)]
    losses = []
    for run in (parallel, again, from_whole):
        losses.append([])
        for step in (1, 2):
            losses[-1].append(step_on_ranks(run, step)[0])
            run.optimizer.zero_grad()
    return {"is_first": saved is not None, "states": states, "codes": codes, "losses": losses}


def digest_of(parallel: Parallel) -> str:
    return digest({"model": exact_state_dict(parallel.model), "optimizer": parallel.optimizer.state_dict()})


def work_of_two(rank: int, ports: list[int], folder: str, _cases: list[Case]) -> None:
    """Two tensor ranks, without data ranks."""
    torch.set_num_threads(1)
    found: Result = {}
    with Mesh(RankEnv(rank=rank, world_size=2, master_port=ports[0]), torch.device("cpu"), Layout(2, tensor=2)) as mesh:
        axes = mesh
        found["gpt", "O3", 0] = trained(axes, "gpt", "O3", 0)
        found["gradients"] = {family: gradients(axes, family) for family in ("gpt", "llama")}
        found["converted"] = {"O3-split": converted(axes, "gpt", "O3-split")}
        found["poisoned"] = [poisoned(axes, 0)]
        found |= {
            "draws": draws(axes),
            "sent": sent(axes),
            "sent llama": sent(axes, "llama"),
            "evaluated": evaluated(axes, partly_ignored()),
        }
        found["resumed"] = {("O3-split", 0): resumed(axes, mesh.world, "O3-split", 0, Path(folder, "O3-split 0"))}
    torch.save(found, f"{folder}/{rank}.pt")

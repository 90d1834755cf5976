"""Loops of somebody's own whose models are divided into stages: what each rank finds out, for `test_staged_loop.py`."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from octet.api_schemas import GPTSizes
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models.llama import LlamaSizes
from octet.worker import checkpoint, fuse_loss, initialize, offload_optimizer, parallelize
from octet.worker.checkpoint.resume import resume
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.mesh import Axis
from octet.worker.models.gpt import GPT
from octet.worker.models.llama import Llama
from octet.worker.parallel.loop import ParallelLoop
from octet.worker.prepare.convert import share_rounding
from tests.worker.parallel.job_runs import checkpoint_ref

WIDTH, TOKENS, VOCABULARY, SAMPLES, MICRO_BATCHES, STEPS, MAX_NORM = 64, 16, 64, 8, 4, 2, 0.5
Result = dict[Any, Any]
Case = tuple[str, str, str]
"""A model, a level and a schedule."""


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Network(nn.Module):
    """In the form in which stages are made by hand: it leaves out what is None. `scale` is of all stages."""

    def __init__(self, *, is_tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Identity()
        self.layers = nn.ModuleDict({str(index): Block(dropout) for index in range(4)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = self.scale(layer(x))
        return x if self.head is None else self.head(self.norm(x))


def _sequence() -> nn.Module:
    """A sequence of children of several shapes. One border of stages separates an activation and the layer that computes it."""
    layers = [nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(96, WIDTH), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))


def _llama() -> nn.Module:
    sizes = LlamaSizes(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_layers=4,
        num_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        rope_theta=10_000.0,
        tie_embeddings=False,
    )
    return Llama(sizes, seed=3)


def _gpt() -> nn.Module:
    sizes = GPTSizes(hidden_size=WIDTH, num_layers=4, num_heads=4, vocab_size=VOCABULARY, max_sequence_length=TOKENS)
    return GPT(sizes, seed=3)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gpt": _gpt,
    "llama": _llama,
    "sequence": _sequence,
    "layers": Network,
    "tied layers": lambda: Network(is_tied=True),
    "dropout": lambda: Network(dropout=0.5),
    "empty": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Softmax(-1)),
}
TIED = ("gpt", "tied layers")


def make(kind: str, level: str) -> tuple[Any, Any]:
    """A model, the same on all ranks, with AdamW. It is not converted at the level "torch"."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = BUILDERS[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if level == "torch":
        return model, optimizer
    return initialize(model, optimizer, level, **({"statistics_every": 0} if LEVELS[level].has_own_fp8 else {}))


def divided(kind: str, model: nn.Module, optimizer: Any, schedule: str, **degrees: Any) -> ParallelLoop:
    blocks: Any = {"blocks": "layers"} if "layers" in kind or kind == "dropout" else {}
    options = {"pipeline": 2, "micro_batches": MICRO_BATCHES, "schedule": schedule} | blocks | degrees
    return parallelize(model, optimizer, **options)


def batch_of(step: int, share: int = 0) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(10 * step + share)
    return tuple(torch.randint(VOCABULARY, (2, SAMPLES, TOKENS), generator=numbers))  # type: ignore[return-value]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(parallel: ParallelLoop, first: int = 0, **own_loss: Any) -> Result:
    """Losses, norms and evaluation of some steps, with the state of the model. own_loss: True for that of the model."""
    losses, norms = [], []
    optimizer, share = parallel.optimizer, parallel.data.rank
    for step in range(first, STEPS):
        losses.append(parallel.step(*_arguments(step, share, **own_loss)))
        norms.append(float(parallel.clip_grad_norm_(MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    parallel.model.eval()
    evaluation = parallel.evaluate(*_arguments(STEPS, share, **own_loss))
    parallel.model.train()
    numbers = [None if loss is None else float(loss) for loss in (*losses, evaluation)]
    return {"losses": numbers[:-1], "evaluation": numbers[-1], "norms": norms, "state": tensors_of(parallel.model)}


def _arguments(step: int, share: int, *, own_loss: bool = False) -> tuple[Any, ...]:
    tokens, targets = batch_of(step, share)
    return ({"tokens": tokens, "targets": targets},) if own_loss else (tokens, targets, mean_loss)


def train_plainly(kind: str, level: str) -> Result:
    """The same on one process, in the plainest loop."""
    model, optimizer = make(kind, level)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = batch_of(step)
        total = torch.zeros(())
        for part, of_part in zip(tokens.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
            loss = mean_loss(model(part), of_part) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    with torch.no_grad():
        evaluation = float(mean_loss(model.eval()(batch_of(STEPS)[0]), batch_of(STEPS)[1]))
    return {"losses": losses, "evaluation": evaluation, "norms": norms, "state": tensors_of(model)}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state dict as bytes."""
    return {name: held.detach().contiguous().reshape(-1).view(torch.uint8) for name, held in exact_state_dict(model).items()}


def resumed(world: Axis, folder: Path) -> Result:
    """A run that was saved after a step, for a checkpoint and by torch; what goes on from each."""
    kind, level, schedule = "layers", "O3-split", "1f1b"
    model, optimizer = make(kind, level)
    parallel = divided(kind, model, optimizer, schedule)
    parallel.step(*_arguments(0, 0))
    optimizer.step()
    optimizer.zero_grad()
    of_rank = copy.deepcopy({"model": exact_state_dict(model), "optimizer": optimizer.state_dict()})
    whole_model, whole_optimizer = parallel.state_dicts()
    checkpoint.save(folder, 1, {"model": whole_model, "optimizer": whole_optimizer}, world)
    world.sum(0.0)  # until the first rank has written the manifest
    found = {"on": train(parallel, first=1)}
    again, its_optimizer = make(kind, level)
    loop = divided(kind, again, its_optimizer, schedule)
    again.load_state_dict(of_rank["model"])
    its_optimizer.load_state_dict(of_rank["optimizer"])
    found["from its own"] = train(loop, first=1)
    whole, of_whole = make(kind, level)
    loop = divided(kind, whole, of_whole, "interleaved")
    state = checkpoint.load(folder, checkpoint_ref(folder))
    resume(whole, of_whole, *loop.own_part(state["model"], state["optimizer"]))
    found["interleaved from the whole"] = train(loop, first=1)
    return found


def draws(rank: int) -> Result:
    """Seed all ranks alike and train one batch. Return the masks of dropout, and the number that the script draws next.

    Stages must drop out different elements, and the script's number must be the same on all ranks.
    """
    model, optimizer = make("dropout", "torch")
    parallel = divided("dropout", model, optimizer, "1f1b")
    masks: list[Any] = []

    def note(module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if module.training:  # not in the pass that finds out what travels
            masks.append((output != 0).tolist())

    for block in model.layers.values():
        if block is not None:
            block.dropout.register_forward_hook(note)
    torch.manual_seed(7)
    parallel.step(*_arguments(0, 0))
    return {"masks": masks, "scripts": float(torch.rand(()))}


def accumulated() -> list[float]:
    """The norm of the gradients of a batch, and of the same batch twice before the optimizer's step."""
    model, optimizer = make("tied layers", "fp32")
    parallel = divided("tied layers", model, optimizer, "1f1b")
    norms = []
    for num_calls in (1, 2):
        for _ in range(num_calls):
            parallel.step(*_arguments(0, 0))
        norms.append(float(parallel.clip_grad_norm_()))
        optimizer.zero_grad()
    return norms


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError, TypeError) as error:
        return str(error)
    return "nothing was refused"


def refusals() -> dict[str, str]:
    def of(kind: str = "layers", level: str = "O2", **options: Any) -> str:
        given = {"pipeline": 2, "micro_batches": 4} | options
        given = {name: value for name, value in given.items() if value is not None}
        return message(lambda: parallelize(*make(kind, level), **given))

    model, optimizer = make("layers", "O2")
    parallel = divided("layers", model, optimizer, "1f1b")
    tokens, targets = batch_of(0)
    found = {
        "uneven": message(lambda: parallel.step(tokens[:6], targets[:6], mean_loss)),
        "targets": message(lambda: parallel.step(tokens, targets[:4], mean_loss)),
        "no loss": message(lambda: parallel.step(tokens)),
        "call": message(lambda: model(tokens)),
    }
    parallel.step(tokens, targets, mean_loss)
    parallel.clip_grad_norm_(1.0)
    used, its_optimizer = make("layers", "O2")
    used(tokens).sum().backward()
    its_optimizer.step()
    offloaded, of_offloaded = make("layers", "O2")
    offload_optimizer(of_offloaded)
    fused, of_fused = make("gpt", "O2")
    fuse_loss(fused)
    compiled, of_compiled = make("layers", "O2")
    compiled.layers["0"].compile(backend="eager")
    return found | {
        "step after clipping": message(lambda: parallel.step(tokens, targets, mean_loss)),
        "blocks": of(blocks="head"),
        "no blocks": of(),
        "family": of("gpt", blocks="layers"),
        "stages": of(blocks="layers", schedule="interleaved", stages_per_rank=3, micro_batches=4),
        "zero-bubble": of(blocks="layers", schedule="zero-bubble"),
        "schedule": of(blocks="layers", schedule="gpipe"),
        "micro_batches": of(blocks="layers", micro_batches=1),
        "none": of(blocks="layers", micro_batches=None),
        "multiple": of(blocks="layers", schedule="interleaved", micro_batches=5),
        "context": of("gpt", context=2),
        "zero": of(blocks="layers", zero_stage=2),
        "ranks": of(blocks="layers", pipeline=3),
        "runs": of(blocks="layers", stages_per_rank=2),
        "without": of(pipeline=1, schedule="interleaved"),
        "empty": of("empty"),
        "fused": message(lambda: parallelize(fused, of_fused, pipeline=2, micro_batches=4)),
        "offloaded": message(lambda: parallelize(offloaded, of_offloaded, pipeline=2, micro_batches=4, blocks="layers")),
        "used": message(lambda: parallelize(used, its_optimizer, pipeline=2, micro_batches=4, blocks="layers")),
        "compiled": message(lambda: parallelize(compiled, of_compiled, pipeline=2, micro_batches=4, blocks="layers")),
    }


def work_of_two(rank: int, ports: list[int], folder: str, cases: list[Case]) -> None:
    """Two stages; each case, and all else that two ranks find out."""
    with _world(rank, 2, ports[0]) as world:
        found: Result = {}
        for kind, level, schedule in cases:
            model, optimizer = make(kind, level)
            found[kind, level, schedule] = train(divided(kind, model, optimizer, schedule))
        found |= {
            "accumulated": accumulated(),
            "refusals": refusals(),
            "draws": draws(rank),
            "resumed": resumed(world, Path(folder, "checkpoints")),
        }
    torch.save(found, f"{folder}/{rank}.pt")


def work_of_four(rank: int, ports: list[int], folder: str, cases: list[tuple[Any, ...]]) -> None:
    """Two stages of two data ranks each, and those data ranks alone; two stages that tensor ranks divide; four stages.

    cases: models with levels and ZeRO stages; whether tensor ranks divide tokens; and others, by name.
    """
    with_data, with_tensor, others = cases
    with _world(rank, 4, ports[0]):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        found: Result = {}
        for kind, level, zero_stage in with_data:
            model, optimizer = make(kind, level)
            both = train(divided(kind, model, optimizer, "1f1b", zero_stage=zero_stage))
            model, optimizer = make(kind, level)
            share_rounding(model, rank % 2, 2)
            in_pairs: Any = {"micro_batches": MICRO_BATCHES, "zero_stage": zero_stage, "group": pairs[rank // 2]}
            found[kind, level, zero_stage] = both, train(parallelize(model, optimizer, **in_pairs))
        for sequence in with_tensor:
            model, optimizer = make("llama", "O3-split")
            parallel = divided("llama", model, optimizer, "interleaved", tensor=2, sequence=sequence)
            found["tensor", sequence] = train(parallel, own_loss=True)
            found["own loss", sequence] = message(lambda held=parallel: held.step(*batch_of(0), mean_loss))  # type: ignore[misc]
        options: dict[str, Any] = {
            "own plan": {"tensor": 2, "plan": {"layers.*.up": "column", "layers.*.down": "row"}},
            "four stages": {"pipeline": 4},
        }
        for name in others:
            model, optimizer = make("layers", "te")
            found[name] = train(divided("layers", model, optimizer, "1f1b", **options[name]))
    torch.save(found, f"{folder}/{rank}.pt")


class _world:
    """The process group of a rank; inside, its axis of all ranks."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self.rank, self.size, self.port = rank, size, port

    def __enter__(self) -> Axis:
        torch.set_num_threads(1)
        address = f"tcp://127.0.0.1:{self.port}"
        dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=self.size)
        return Axis("world", self.size, self.rank, torch.device("cpu"))

    def __exit__(self, *_error: Any) -> None:
        dist.destroy_process_group()

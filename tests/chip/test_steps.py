"""The trainer on the chip: a step after warm-up waits for nothing, no access is out of order, and the bits are a CPU's.

Each run is made twice: on the chip, with the roads of CUDA, CUDA graphs, and NCCL on several ranks; and on a CPU that behaves
as an accelerator, without them.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from octet.api_schemas import JobSpec, TextSpec
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.worker import initialize
from octet.worker.common.config import RankEnv, resolve
from octet.worker.data import open_source
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.mesh import Axis, Mesh, Pending
from octet.worker.mesh.waits import DEVICE
from octet.worker.models import build_model
from octet.worker.optim.rules.muon import OrthogonalizedMomentum
from octet.worker.parallel.data_parallel import GradientBuckets
from octet.worker.train.loop import Trainer
from tests.chip.lies import chip_of
from tests.chip.nccl import Launched, check_order, communicators
from tests.golden import record
from tests.kit.images import write_images
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks
from tests.kit.small_model import LEVELS_OF_CODES, Small
from tests.kit.training import Recorder, with_training
from tests.worker.models.test_architectures import CONFIGS, batch_of

GPU = torch.device("cuda", 0)
SAVINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "full checkpointing": {"activation_checkpointing": "full"},
    "activations in FP8": {"saved_activations": "fp8"},
    "fused loss": {"fused_loss": True},
    "gradient release": {"gradient_release": True, "gradient_clip": None, "micro_batch_size": 2},
    "offloaded states": {"offload_optimizer": True},
    "moving average": {"ema_decay": 0.9},
}
IN_SYSTEM = {("te", "nothing"), ("O2", "moving average"), ("O2", "offloaded states"), ("O3-split", "nothing")}
DIVISIONS: dict[str, dict[str, Any]] = {
    "data": {},
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3},
    "tensor": {"tensor": 2},
    "tensor, sequence": {"tensor": 2, "sequence": True},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2},
}
DIVIDED_IN_SYSTEM = {("O2", "data"), ("te", "ZeRO 1"), ("O2", "ZeRO 3"), ("O2", "pipeline")}
NO_WAIT: Mapping[str, int] = {}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tensor and data": (4, 2, {"tensor": 2, "zero_stage": 1}),
    "tensor and pipeline": (4, 2, {"tensor": 2, "pipeline": 2}),
    "pipeline of four": (4, 4, {"pipeline": 4}),
    "interleaved": (2, 4, {"pipeline": 2, "schedule": "interleaved"}),
    "interleaved of four": (4, 8, {"pipeline": 4, "schedule": "interleaved"}),
}
"""Ranks, blocks of the model, and the axes."""
OPTIMIZERS = ("adam", "lion", "muon", "sgd")
"""Those besides AdamW."""
WAIT_OF_MUON = {"_local_scalar_dense at worker/optim/optimizer.py": 1}
"""The host skips its products where a gradient is not finite."""
RECORDED = ("data", "ZeRO 1", "ZeRO 2")
"""Divisions whose steps are recorded."""
REFUSED = {
    *((name, "fp16-amp") for name in ("fused loss", "gradient release", "tensor", "context")),
    *((name, "ao") for name in ("tensor", "context", "pipeline")),
}
"""Savings and divisions that a level refuses."""


class Trained(NamedTuple):
    """The results of a run. waits: of each step, by the name and the place. launched: by this rank, with NCCL's rules.

    state: a digest of weights and optimizer states. num_launches: of each step. counted: bytes sent, collectives started.
    num_communicators: those that NCCL has after each step.
    """

    numbers: list[tuple[float, float]]
    state: str
    waits: list[dict[str, int]]
    launched: list[Launched]
    num_launches: list[int]
    counted: list[Counter[Any]]
    num_communicators: list[int]


def job(document: dict[str, Any], level: str, **training: Any) -> dict[str, Any]:
    """A job with two micro-batches, clipping, and statistics in every other step."""
    options = {"steps": 100, "global_batch_size": 2, "micro_batch_size": 1, "gradient_clip": 0.1, "compile": "off", **training}
    document = with_training(document, level, **options)
    document["model"] = document["model"] | {"hidden_size": 16}
    if LEVELS[level].has_own_fp8:
        document["precision"] = {"level": level, "auto_filter": False, "statistics_every": 2, "demotion": {"patience": 2}}
    return document


def is_refused(document: dict[str, Any]) -> bool:
    """Return True if the contract refuses a job. Other tests check its reasons."""
    try:
        resolve(JobSpec.model_validate(document), RankEnv(world_size=document.get("resources", {}).get("workers", 1)))
    except ValueError:
        return True
    return False


def train(
    document: dict[str, Any],
    folder: Path,
    num_steps: int,
    *,
    on_chip: bool,
    env: RankEnv | None = None,
    plant: Callable[[Trainer], None] | None = None,
    timeout_s: float = 300.0,
) -> Trained:
    """Take steps between two reports. plant: a fault. timeout_s: the longest wait in a collective."""
    torch.set_num_threads(1)
    env = env or RankEnv()
    config, waits, num_launches, num_communicators = resolve(JobSpec.model_validate(document), env), [], [], []
    with ExitStack() as stack:
        chip = stack.enter_context(chip_of()) if on_chip else None
        launched = stack.enter_context(communicators(chip)).launched if chip is not None else []
        if chip is None:
            stack.enter_context(cpu_as_accelerator())
            stack.enter_context(mock.patch.object(OrthogonalizedMomentum, "matrix_dtype", return_value=torch.bfloat16))
        mesh = stack.enter_context(Mesh(env, GPU if on_chip else torch.device("cpu"), config.layout, timeout_s))
        trainer = Trainer(config, mesh, Recorder(), folder / ("chip" if on_chip else "cpu"))
        stack.callback(trainer.job.graph.close)
        if plant is not None:
            plant(trainer)
        before = counts(mesh)
        for _ in range(num_steps):
            if chip is not None:
                chip.begin_step()
            trainer.step()
            trainer.log.num_steps = 100  # after the first step no report until then
            waits.append(dict(chip.waits) if chip is not None else {})
            num_launches.append(chip.num_launches - chip.first_launch + 1 if chip is not None else 0)
            num_communicators.append(chip.num_communicators if chip is not None else 0)
        trainer.batches.close()
        numbers = [(step.loss, step.gradient_norm) for step in trainer.log.flush().steps]
        counted = [now - then for now, then in zip(counts(mesh), before, strict=True)]
        leaves = tree_leaves((exact_state_dict(trainer.model), trainer.optimizer.state_dict()["state"]))
        state = record.digest([torch.as_tensor(leaf).cpu() for leaf in leaves])
    return Trained(numbers, state, waits, launched, num_launches, counted, num_communicators)


def counts(mesh: Mesh) -> list[Counter[Any]]:
    """Return the bytes that this rank has sent, and the collectives that it has started."""
    return [mesh.sent_bytes.copy(), Counter({axis: n for axis, n in mesh.waits.num_started.items() if axis != DEVICE})]


@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize(
    ("level", "saving"),
    [
        pytest.param(level, saving, marks=pytest.mark.system if (level, saving) in IN_SYSTEM else pytest.mark.matrix)
        for level in LEVELS
        for saving in SAVINGS
    ],
)
def test_one_rank(tmp_path: Path, spec_document: dict[str, Any], level: str, saving: str) -> None:
    """Three steps that are launched, two that are recorded, one of them sampled, and two that are replayed."""
    document = job(spec_document, level, **SAVINGS[saving])
    if is_refused(document):
        assert (saving, level) in REFUSED
        return
    check_one_rank(document, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_rank_with_another_optimizer(tmp_path: Path, spec_document: dict[str, Any], optimizer: str) -> None:
    document = job(spec_document, "O2", optimizer={"name": optimizer})
    check_one_rank(document, tmp_path, WAIT_OF_MUON if optimizer == "muon" else {})


@pytest.mark.matrix
def test_one_rank_with_packed_documents(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    """Several documents in each row of 32 tokens."""
    for number in range(100):
        tmp_path.joinpath(f"{number}.txt").write_text("document"[: 4 + number % 5] * 3)
    document = job(spec_document, "O2")
    document["data"] = {"source": "text", "path": str(tmp_path), "packing": True}
    documents = open_source(TextSpec(path=str(tmp_path), packing=True), 32, 1).train_batch(0, 2)["documents"]
    assert (documents[:, 1] < 32).all(), "each row has more than one"
    check_one_rank(document, tmp_path)


def check_one_rank(document: dict[str, Any], folder: Path, known: Mapping[str, int] = NO_WAIT) -> None:
    """Train on both; assert equal bits, and only the known waits outside of a capture."""
    found, expected = (train(document, folder, 7, on_chip=on_chip) for on_chip in (True, False))
    if document["precision"]["level"] == "ao":  # torchao multiplies FP8 on CUDA, and emulates it on a CPU
        assert [loss for loss, _ in found.numbers] == pytest.approx([loss for loss, _ in expected.numbers], rel=1e-2)
    else:
        assert (found.numbers, found.state) == (expected.numbers, expected.state)
    check_waits(found.waits, known)


def check_waits(waits: list[dict[str, int]], known: Mapping[str, int] = NO_WAIT) -> None:
    """Assert that each step after the first has the known waits and no other, but for captures. known: by file."""
    is_capture = [any(name.startswith("cuda.synchronize at worker/train/step_graph.py") for name in step) for step in waits]
    for step, captures in zip(waits[1:], is_capture[1:], strict=True):
        found = Counter[str]()
        for name, number in step.items():
            found[name.rpartition(":")[0]] += number
        assert captures or found == known, step
    assert sum(is_capture) <= 2


def check_launches(num_launches: list[int]) -> None:
    """Assert that the last two steps, which are replayed, launch graphs, copies of batches and results, and little else."""
    assert 8 * max(num_launches[-2:]) < min(num_launches[:3]), num_launches


OF_IMAGES = {"image_size": 16, "patch_size": 2, "num_classes": 4, "drop_path_rate": 0.5}
FAMILIES: dict[str, dict[str, Any]] = {
    "swin": OF_IMAGES | {"preset": "swin-tiny", "depths": [1, 1]},
    "deit": OF_IMAGES | {"preset": "deit-tiny", "hidden_size": 32, "num_layers": 2, "num_heads": 2},
    "roberta": {"preset": "roberta-tiny", "hidden_size": 32, "num_layers": 1, "num_heads": 2},
}


@pytest.mark.parametrize(
    ("family", "level"),
    [
        pytest.param(family, level, marks=pytest.mark.system if (family, level) == ("swin", "O2") else pytest.mark.matrix)
        for family in FAMILIES
        for level in LEVELS
        if level != "ao"
    ],
)
def test_one_rank_of_other_families(tmp_path: Path, spec_document: dict[str, Any], family: str, level: str) -> None:
    check_one_rank(of_family(family, job(spec_document, level), tmp_path), tmp_path)


def of_family(family: str, document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the same job of another family; those of images get a file of them."""
    document = document | {"model": FAMILIES[family]}
    if family != "roberta":
        document["data"] = {"source": "images", "path": str(write_images(folder / "images.npz"))}
        del document["training"]["sequence_length"]
    return document


@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize("level", [pytest.param(level, marks=pytest.mark.system) for level in LEVELS_OF_CODES])
def test_a_graph_of_ones_own_reads_weights_through_steps_and_writes(level: str) -> None:
    """After each step it has the bits of eager code; a write in a graph is refused, and so is a read of one that waits."""
    torch.manual_seed(0)
    with chip_of():
        model = Small().to(GPU)
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), level, convert_heads=True)
        x, weight, graph = torch.randn(16, 32).to(GPU), model.first.weight, torch.cuda.CUDAGraph()

        def read() -> list[Tensor]:
            with torch.no_grad():
                return [model(x), *(parameter.square().mean() for parameter in model.parameters())]

        def step() -> None:
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with torch.cuda.graph(graph):
            found = read()
        for factor in (1.0, 0.5):
            if factor != 1.0:
                with torch.no_grad():
                    weight.mul_(factor)
            step()
            graph.replay()
            assert all(map(torch.equal, [one.cpu() for one in found], [one.cpu() for one in read()]))
        refused = "is (read|written) inside of a CUDA graph, which has its codes"
        with torch.no_grad(), pytest.raises(NotImplementedError, match=refused), torch.cuda.graph(torch.cuda.CUDAGraph()):
            weight.mul_(0.5)
        with torch.no_grad():
            weight.mul_(0.5)
        with pytest.raises(NotImplementedError, match=refused), torch.cuda.graph(torch.cuda.CUDAGraph()):
            read()


@pytest.mark.system
def test_an_evaluation_waits_once_for_its_result(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    config = resolve(JobSpec.model_validate(job(spec_document, "O2")), RankEnv())
    assert config.eval_batches > 1
    with chip_of() as chip, Mesh(RankEnv(), GPU, config.layout) as mesh:
        trainer = Trainer(config, mesh, Recorder(), tmp_path)
        trainer.step()
        chip.begin_step()
        trainer.evaluate()
        trainer.batches.close()
        [name] = chip.waits
        assert name.startswith("pageable copy at worker/train/loop.py")  # of the sums
        assert chip.waits[name] == 1


def job_of_two(document: dict[str, Any], level: str, division: str, **training: Any) -> dict[str, Any]:
    """A job of two ranks, each with two micro-batches."""
    document = job(document, level, **{"global_batch_size": 4, **training})
    document["model"] = document["model"] | {"hidden_size": 32, "num_layers": 2}
    return document | {"resources": {"workers": 2}, "parallelism": DIVISIONS[division]}


def train_rank(rank: int, port: int, document: dict[str, Any], folder: str, num_steps: int, on_chip: bool) -> None:
    env = RankEnv(rank=rank, world_size=document["resources"]["workers"], master_port=port)
    torch.save(tuple(train(document, Path(folder), num_steps, on_chip=on_chip, env=env)), Path(folder, f"{rank}.pt"))


@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize(
    ("level", "division"),
    [
        pytest.param(
            level,
            division,
            marks=pytest.mark.system if (level, division) in DIVIDED_IN_SYSTEM else pytest.mark.matrix,
        )
        for level in LEVELS
        for division in DIVISIONS
    ],
)
def test_two_ranks(tmp_path: Path, spec_document: dict[str, Any], level: str, division: str) -> None:
    document = job_of_two(spec_document, level, division)
    if is_refused(document):
        assert (division.split(",")[0], level) in REFUSED
        return
    check_ranks(document, tmp_path, level, is_recorded=division in RECORDED)


@pytest.mark.matrix
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_with_another_optimizer(tmp_path: Path, spec_document: dict[str, Any], optimizer: str) -> None:
    document = job_of_two(spec_document, "O2", "ZeRO 1", optimizer={"name": optimizer})
    is_muon = optimizer == "muon"
    known = WAIT_OF_MUON | {"pageable copy at worker/parallel/zero.py": 1} if is_muon else NO_WAIT  # for who has a gradient
    check_ranks(document, tmp_path, "O2", is_recorded=not is_muon, known=known)


@pytest.mark.system
def test_two_ranks_that_hold_other_experts(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    """Each of two passes through the mixture waits once: NCCL takes numbers of the host for how many rows go where."""
    document = job_of_two(spec_document, "O2", "data") | {"parallelism": {"expert": 2}}
    config = CONFIGS["qwen3_moe"] | {"num_hidden_layers": 1}
    document["model"] = {"family": "huggingface", "architecture": "qwen3_moe", "config": config}
    known = {"pageable copy at worker/parallel/expert.py": 2}
    check_ranks(document, tmp_path, "O2", is_recorded=False, known=known)


@pytest.mark.matrix
@pytest.mark.parametrize("level", ["te", "O2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_other_layouts(tmp_path: Path, spec_document: dict[str, Any], layout: str, level: str) -> None:
    """Four micro-batches in a pipeline, or two by two ranks."""
    num_ranks, num_layers, axes = LAYOUTS[layout]
    document = job_of_two(spec_document, level, "data") | {"resources": {"workers": num_ranks}, "parallelism": axes}
    document["model"] = document["model"] | {"num_layers": num_layers}
    check_ranks(document, tmp_path, level, is_recorded=False)


@pytest.mark.matrix
@pytest.mark.parametrize("level", ["te", "O2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_of_other_families(tmp_path: Path, spec_document: dict[str, Any], family: str, level: str) -> None:
    document = of_family(family, job_of_two(spec_document, level, "data"), tmp_path)
    check_ranks(document, tmp_path, level, is_recorded=True)


def check_ranks(
    document: dict[str, Any], folder: Path, level: str, *, is_recorded: bool, known: Mapping[str, int] = NO_WAIT
) -> None:
    """Train on both; assert equal bits and counts, only the known waits outside of a capture, and one order of launches.

    All communicators exist after the first step.
    """
    runs, num_steps, num_ranks = [], 7 if is_recorded else 3, document["resources"]["workers"]
    for on_chip in (True, False):
        run_ranks(train_rank, (free_port(), document, str(folder), num_steps, on_chip), num_ranks)
        runs.append([Trained(*saved) for saved in saved_by_ranks(folder, num_ranks)])
    for found, expected in zip(*runs, strict=True):
        if level != "ao":
            assert (found.numbers, found.state) == (expected.numbers, expected.state)
        assert found.counted == expected.counted
        check_waits(found.waits, known)
        assert found.num_communicators[0] > 0
        assert len(set(found.num_communicators)) == 1, "one was made after the first step"
        if is_recorded:
            check_launches(found.num_launches)
    check_order([found.launched for found in runs[0]])


KNOWN_TO_WAIT = {
    "opt": "which makes a mask of ones for itself, and looks whether it is one",
    "falcon": "which indexes each layer's queries by lists",
    "bloom": "whose mask, of transformers' eager attention, begins as a number of the host",
    "gpt_oss": "whose masks, of transformers' eager attention, begin as a number of the host",
}
"""Networks whose own code waits in each pass."""


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # transformers' DeBERTa, when it is imported
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name in ("llama", "deberta-v2") else pytest.mark.matrix)
        for name in CONFIGS
        if name not in KNOWN_TO_WAIT
    ],
)
def test_no_pass_of_a_network_of_transformers_waits(architecture: str) -> None:
    """The first pass may send what stays."""
    spec = HuggingFaceSpec(family="huggingface", architecture=architecture, config=CONFIGS[architecture])
    model, _ = initialize(build_model(spec, 0), None, "bf16-amp")
    with chip_of() as chip:
        model.to(GPU)
        batch = {name: tensor.to(GPU) for name, tensor in batch_of(architecture).items()}
        chip.begin_step()
        model.loss(batch).loss.backward()
        assert dict(chip.waits) == {}


class AloneWithItself(Axis):
    """An axis of two ranks. The other one sends what this one sends."""

    def start_exchange(self, parts_RS: Tensor) -> Pending:
        return Pending(torch.stack([parts_RS[0], parts_RS[0]]))

    def start_gather(self, own_S: Tensor, into_RS: Tensor | None = None) -> Pending:
        return Pending(torch.stack([own_S, own_S]))


@pytest.mark.parametrize("has_all", [True, False])
def test_an_exchange_of_gradients_copies_nothing_from_the_host(has_all: bool) -> None:
    """Its hooks run in the backward pass. Without a gradient of its own a rank reads, at the end, if another one has some."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        chip = stack.enter_context(chip_of())
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to(GPU)
        buckets = GradientBuckets(model, AloneWithItself("data", 2, 0, GPU), max_elements=40)
        loss = (model if has_all else model[0])(torch.ones(2, 4, device=GPU)).sum()
        chip.begin_step()
        loss.backward()
        buckets.finish()
        assert len(chip.waits) == (0 if has_all else 1), chip.waits
        assert (model[1].weight.grad is None) == (not has_all)


def test_a_recorded_exchange_does_as_the_step_before_it() -> None:
    """Which gradients no rank has is known then. A pass that lacks others is no such step."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.enter_context(communicators(stack.enter_context(chip_of())))
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to(GPU)
        buckets = GradientBuckets(model, AloneWithItself("data", 2, 0, GPU), max_elements=40)

        def step(part: torch.nn.Module) -> None:
            part(torch.ones(2, 4, device=GPU)).sum().backward()
            buckets.finish()

        for part in (model, model[0]):
            model.zero_grad()
            step(part)
        model.zero_grad()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step(model[0])
        assert model[1].weight.grad is None
        model.zero_grad()
        with pytest.raises(RuntimeError, match="lacked others"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            step(model)

"""ZeRO over real ranks (gloo): each level trains to the bits of one process, and states are saved whole and cut again."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from api_schemas import CheckpointRef, JobSpec, Layout, StepReport
from api_schemas.levels import LEVELS
from tests.golden.record import digest
from tests.golden.record import document as golden_job
from tests.ranks import free_port, run_ranks
from tests.text import write_corpus
from tests.worker.small import Small, spread
from tests.worker.test_train import Recorder
from worker import initialize, kernels, memory_report
from worker.config import RankEnv, resolve
from worker.fp8.gradient import Float8Gradient
from worker.fp8.linear import Fallback, Float8Linear
from worker.mesh import Axis, Mesh
from worker.parallel import Parallel
from worker.parallel.zero import clip_factor, squared_norm
from worker.train import Trainer

pytestmark = pytest.mark.slow
AXES = {"data": 2, "world": 4}
"""Axes of one mesh of 4 ranks, with their sizes."""
STAGES = (0, 1)
STEPS, MICRO_BATCHES, MAX_NORM = 4, 2, 0.05
NUM_UNUSED = 64 * 64
NUM_CONVERTED = 32 * 64 + 64 * 64 + 64 * 32 + 32 * 16 + NUM_UNUSED
NUM_BUCKETS = 3
"""Of converted weights, at MAX_ELEMENTS."""
MAX_ELEMENTS = 6000
Result = dict[str, Any]


class Net(Small):
    """With a parameter that nobody uses, and one whose elements are no multiple of 128."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(64, 64)
        self.shift = nn.Parameter(torch.zeros(16))


def make(level: str, share: int, num_shares: int) -> tuple[Net, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net()
    options = {"convert_heads": True, "statistics_every": 0} if LEVELS[level].has_own_fp8 else {}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, made = initialize(net, optimizer, level, **options)
    assert isinstance(model, Net)
    assert made is not None
    set_share(model, share, num_shares)
    return model, made


def set_share(model: nn.Module, share: int, num_shares: int) -> None:
    for layer in model.modules():
        if isinstance(layer, Float8Linear) and layer.gradient_position is not None:
            layer.gradient_position.share, layer.gradient_position.num_shares = share, num_shares


def loss_of(model: Net, rank: int, step: int, micro_batch: int) -> Tensor:
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(1000 * rank + 10 * step + micro_batch))
    return ((model(x) + model.shift - x[:, :16].tanh()) ** 2).mean() / MICRO_BATCHES


def step_on_ranks(parallel: Parallel, step: int) -> float:
    """One optimizer step of this rank. Returns its loss."""
    losses = []
    for micro_batch in range(MICRO_BATCHES - 1):
        with parallel.no_sync():
            losses.append(loss_of(parallel.model, parallel.data.rank, step, micro_batch))
            losses[-1].backward()
    losses.append(loss_of(parallel.model, parallel.data.rank, step, MICRO_BATCHES - 1))
    losses[-1].backward()
    parallel.synchronize()
    parallel.clip_grad_norm_(MAX_NORM)
    parallel.optimizer.step()
    parallel.publish()
    return sum(float(loss.detach()) for loss in losses)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return digest({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def parallel_on(axis: Axis, level: str, stage: int) -> Parallel:
    model, optimizer = make(level, axis.rank, axis.size)
    return Parallel(model, optimizer, axis, axis, zero_stage=stage, max_elements=MAX_ELEMENTS)


def trained(axis: Axis, level: str, stage: int) -> Result:
    parallel = parallel_on(axis, level, stage)
    losses = []
    for step in range(STEPS):
        losses.append(step_on_ranks(parallel, step))
        memory_bytes = memory_report(parallel.model, parallel.optimizer, converted_only=LEVELS[level].has_own_fp8)
        parallel.optimizer.zero_grad()
    return {"losses": losses, "state": state_of(parallel.model, parallel.optimizer), "memory_bytes": memory_bytes}


def resumed(first: Axis, second: Axis, level: str) -> Result:
    """States: of a run of STEPS on the first axis; of one that was saved halfway and resumed there; loaded on the second."""
    whole = trained(first, level, 1)["state"]
    begun = parallel_on(first, level, 1)
    for step in range(STEPS // 2):
        step_on_ranks(begun, step)
        begun.optimizer.zero_grad()
    saved = {"model": begun.model.state_dict(), "optimizer": begun.optimizer.state_dict()}
    same, other = parallel_on(first, level, 1), parallel_on(second, level, 1)
    for parallel in (same, other):
        parallel.model.load_state_dict(saved["model"])
        parallel.optimizer.load_state_dict(saved["optimizer"])
    loaded_elsewhere = state_of(other.model, other.optimizer)
    for step in range(STEPS // 2, STEPS):
        step_on_ranks(same, step)
        same.optimizer.zero_grad()
    again = state_of(same.model, same.optimizer)
    return {"whole": whole, "resumed": again, "saved": digest(saved), "loaded elsewhere": loaded_elsewhere}


def poisoned(axis: Axis) -> Result:
    """A step in which one rank has a NaN: how many steps were skipped, and the model before and after."""
    parallel = parallel_on(axis, "O3", 1)
    step_on_ranks(parallel, 0)
    parallel.optimizer.zero_grad()
    before = digest(parallel.model.state_dict())
    loss = loss_of(parallel.model, axis.rank, 1, 0)
    (loss * (torch.nan if axis.rank == 1 else 1.0)).backward()
    parallel.gradients.finish()
    parallel.optimizer.step()
    parallel.publish()
    return {"skipped": parallel.optimizer.num_skipped_steps, "kept": before == digest(parallel.model.state_dict())}


def demoted(axis: Axis) -> Result:
    """What of a layer's residual the layer holds before and after its demotion, and whether the output is as at stage 0."""
    sharded, plain = parallel_on(axis, "O3-split", 1), parallel_on(axis, "O3-split", 0)
    x, outputs, held = torch.ones(4, 32), [], []
    for parallel in (sharded, plain):
        layer = parallel.model.inner[0]
        held.append(0 if layer.weight_residual is None else layer.weight_residual.numel())
        layer.fallback = Fallback.DEMOTED
        parallel.publish()
        outputs.append(parallel.model(x).detach())
    residual = sharded.model.inner[0].weight_residual
    return {"held before": held[0], "held after": residual.numel(), "output is the same": torch.equal(*outputs)}


def sent(axis: Axis) -> dict[tuple[str, str], int]:
    """Bytes that a rank sends in a step without clipping at O3, by collective and dtype."""
    parallel = parallel_on(axis, "O3", 1)
    axis.sent_bytes.clear()
    loss_of(parallel.model, axis.rank, 0, 0).backward()
    parallel.synchronize()
    parallel.optimizer.step()
    parallel.publish()
    return dict(axis.sent_bytes)


def job(corpus: str, workers: int, stage: int) -> JobSpec:
    """A job that does not clip: the norm is the one number that a stage sums in another order."""
    document = golden_job({"level": "O3-split"}, Path(corpus), workers)
    training = {"steps": 4, "micro_batch_size": 1, "checkpoint_every": 2, "schedule": {}, "gradient_clip": None}
    parallelism = {"parallelism": {"zero_stage": stage}}
    return JobSpec.model_validate(document | parallelism | {"training": document["training"] | training})


def run_job(spec: JobSpec, env: RankEnv, folder: Path, checkpoints: tuple[CheckpointRef, ...] = ()) -> Recorder:
    recorder, config = Recorder(), resolve(spec, env)
    with Mesh(env, torch.device("cpu"), config.layout) as mesh:
        Trainer(config, mesh, recorder, folder).run(checkpoints)
    return recorder


def work(rank: int, ports: list[int], folder: str, corpus: str, cases: list[tuple[str, int]]) -> None:
    torch.set_num_threads(1)
    recorders = []
    for stage in STAGES:
        env = RankEnv(rank=rank, world_size=4, master_port=ports[stage])
        recorders.append(run_job(job(corpus, 4, stage), env, Path(folder, f"stage{stage}")))
    with Mesh(RankEnv(rank=rank, world_size=4, master_port=ports[-1]), torch.device("cpu"), Layout(4, tensor=2)) as mesh:
        axes = {"data": mesh.data, "world": mesh.world}
        found: Result = {(name, *case): trained(axis, *case) for name, axis in axes.items() for case in cases}
        found["resumed"] = {level: resumed(mesh.world, mesh.data, level) for level in ("O3", "O3-split")}
        found["poisoned"] = poisoned(mesh.world)
        found["jobs"] = recorders
        found["demoted"] = {name: demoted(axis) for name, axis in axes.items()}
        found["sent"] = {name: sent(axis) for name, axis in axes.items()}
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Result]:
    """What each rank found, for the selected levels and stages."""
    folder = tmp_path_factory.mktemp("zero")
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = [item.callspec.params for item in tests if item.function is test_ranks_train_to_the_bits_of_one_process]
    cases = sorted({(params["level"], params["stage"]) for params in chosen} | {("O3", 1), ("O3-split", 1)})
    corpus = write_corpus(folder / "corpus")
    run_ranks(work, ([free_port() for _ in range(3)], str(folder), str(corpus), cases), 4)
    found: list[Result] = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)]
    return [result | {"folder": folder, "corpus": corpus} for result in found]


def reference(level: str, stage: int, num_ranks: int) -> Result:
    """One process: the ranks' micro-batches in the ranks' order, each rank's gradients stored, their mean rounded once."""
    model, optimizer = make(level, 0, num_ranks)
    layers = [layer for layer in model.modules() if isinstance(layer, Float8Linear) and layer.gradient_position is not None]
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    for step in range(STEPS):
        counts = [layer.gradient_position.count for layer in layers]
        found: list[list[Tensor | None]] = []
        for rank in range(num_ranks):
            set_share(model, rank, num_ranks)
            for layer, count in zip(layers, counts, strict=True):
                layer.gradient_position.count = count
            parts = [loss_of(model, rank, step, micro_batch) for micro_batch in range(MICRO_BATCHES)]
            for part in parts:
                part.backward()
            losses[rank].append(sum(float(part.detach()) for part in parts))
            found.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
        for parameter, *gradients in zip(model.parameters(), *found, strict=True):
            parameter.grad = mean_of(gradients)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if stage == 0:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        else:
            norm = sum(squared_norm(gradient) for gradient in gradients).sqrt().float()
            for gradient in gradients:
                gradient.mul_(clip_factor(norm, MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "state": state_of(model, optimizer)}


def mean_of(gradients: list[Any]) -> Tensor | None:
    first = gradients[0]
    if first is None:
        return None
    if not isinstance(first, Float8Gradient):
        total = first.clone()
        for gradient in gradients[1:]:
            total += gradient
        return total / len(gradients)
    codes_RS = torch.stack([gradient.codes.view(torch.uint8).view(-1) for gradient in gradients]).view(torch.float8_e4m3fn)
    mean_S, amax = kernels.mean_of_shards(codes_RS, torch.stack([gradient.dequant_scale for gradient in gradients]))
    codes, dequant_scale = kernels.quantize(mean_S, torch.float8_e4m3fn, amax=amax)
    return Float8Gradient(codes.view(first.shape), dequant_scale, first.position)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("level", [*spread(LEVELS)])
def test_ranks_train_to_the_bits_of_one_process(results: list[Result], level: str, axis: str, stage: int) -> None:
    ranks = [result[axis, level, stage] for result in (results[::2] if axis == "data" else results)]
    expected = reference(level, stage, AXES[axis])
    assert [rank["losses"] for rank in ranks] == expected["losses"]
    assert {rank["state"] for rank in ranks} == {expected["state"]}
    assert expected["losses"][0][-1] < expected["losses"][0][0]


@pytest.mark.parametrize("level", ["O3", "O3-split"])
def test_a_run_resumes_to_the_bit_and_loads_at_another_number_of_ranks(results: list[Result], level: str) -> None:
    for result in results:
        found = result["resumed"][level]
        assert found["resumed"] == found["whole"]
        assert found["loaded elsewhere"] == found["saved"]


def test_a_nan_of_one_rank_makes_all_ranks_skip(results: list[Result]) -> None:
    assert [result["poisoned"] for result in results] == [{"skipped": 1, "kept": True}] * 4


@pytest.mark.parametrize("axis", AXES)
def test_states_masters_and_gradients_are_shared_evenly(results: list[Result], axis: str) -> None:
    """Each rank holds a share, even to the element, of masters of 2 bytes, gradients and first moments of 1 byte."""
    ranks = [result[axis, "O3", 1]["memory_bytes"] for result in (results[::2] if axis == "data" else results)]
    num_bytes = {"master_weights": 2 * NUM_CONVERTED, "gradients": NUM_CONVERTED - NUM_UNUSED}
    for kind, expected in num_bytes.items():
        assert sum(rank[kind] for rank in ranks) == expected
        assert max(rank[kind] for rank in ranks) <= expected / len(ranks) + NUM_UNUSED + 2 * 128 * NUM_BUCKETS
    assert all(rank["weights"] == NUM_CONVERTED for rank in ranks)
    num_low = 2 * 64 * 64  # in tensors that are large enough for few bits, with steps of 2 bytes for each block of 128
    assert sum(rank["exp_avg"] for rank in ranks) == num_low + 2 * num_low // 128 + 4 * (NUM_CONVERTED - num_low)


@pytest.mark.parametrize("axis", AXES)
def test_residuals_are_shared_evenly(results: list[Result], axis: str) -> None:
    ranks = [result[axis, "O3-split", 1]["memory_bytes"] for result in (results[::2] if axis == "data" else results)]
    assert sum(rank["master_weights"] for rank in ranks) == NUM_CONVERTED
    assert max(rank["master_weights"] for rank in ranks) < NUM_CONVERTED / len(ranks) + NUM_UNUSED


@pytest.mark.parametrize("axis", AXES)
def test_a_demoted_layer_gets_its_whole_residual(results: list[Result], axis: str) -> None:
    """A layer that multiplies in bf16 reads more than codes: its output is that of the same model without sharding."""
    for result in results:
        assert result["demoted"][axis] == {"held before": 0, "held after": 64 * 64, "output is the same": True}


@pytest.mark.parametrize("axis", AXES)
def test_bytes_on_the_wire_are_those_of_the_formula(results: list[Result], axis: str) -> None:
    """Gradients as codes to their owners, weights as codes from them: a byte for each element that is another rank's."""
    num_ranks = AXES[axis]
    for result in results:
        sent = result["sent"][axis]
        codes = sent["exchange", "float8_e4m3fn"]
        assert codes == sent["gather", "float8_e4m3fn"]
        assert NUM_CONVERTED <= codes * num_ranks / (num_ranks - 1) <= NUM_CONVERTED + num_ranks * 128 * NUM_BUCKETS


def test_a_sharded_job_trains_saves_and_resumes_as_one_that_is_not(results: list[Result], tmp_path: Path) -> None:
    whole, sharded = results[0]["jobs"]
    assert sharded.losses() == whole.losses()
    folders = [results[0]["folder"] / f"stage{stage}" / "checkpoints" for stage in STAGES]
    for saved, saved_sharded in zip(whole.checkpoints(), sharded.checkpoints(), strict=True):
        files = [folder / ref.name / "tensors.safetensors" for folder, ref in zip(folders, (saved, saved_sharded), strict=True)]
        assert files[0].read_bytes() == files[1].read_bytes()
    at_step_2 = sharded.checkpoints()[1:]
    shutil.copytree(folders[1], tmp_path / "checkpoints")
    alone = run_job(job(str(results[0]["corpus"]), 1, 1), RankEnv(), tmp_path, at_step_2)
    assert [report.step for report in alone.of(StepReport)] == [3, 4]
    # The same batches, summed in another order: FP8 gradients are rounded at other places.
    assert alone.losses() == pytest.approx(sharded.losses()[2:], rel=2e-2)

"""Replayed steps train as those that the host runs, bit for bit: a recording keeps no number that changes.

The recording is a tape of ops on a CPU that behaves as an accelerator (`tape.py`); the optimizer runs its kernels in Triton's
interpreter. What a tape cannot see, the tables of addresses inside of kernels' launches, has tests of its own below.
"""

import weakref
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from octet.api_schemas import JobSpec
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models import families_with
from octet.api_schemas.rules.table import reason_against
from octet.worker import initialize, kernels
from octet.worker.common.config import RankEnv, resolve
from octet.worker.common.errors import InvalidConfig
from octet.worker.data import prefetch
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.fp8.fallback import Fallback
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.kernels.cuda import tables
from octet.worker.kernels.held import holding
from octet.worker.mesh import Axes, Mesh
from octet.worker.optim import LowBitAdamW, LowBitOptimizer
from octet.worker.prepare.blocks import WARM_UP_STEPS
from octet.worker.train import step_graph
from octet.worker.train.log import FinishedStep
from octet.worker.train.loop import Trainer
from octet.worker.train.step_graph import StepGraph
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks
from tests.kit.tape import Tape, TapeRecorder, optimizer_by_kernels
from tests.kit.training import Recorder, with_training

NUM_STEPS = 7
"""0 to 2 run as they are, 3 (sampled) and 4 are recorded, 5 and 6 (sampled) are replayed."""
GPT2 = {"family": "huggingface", "architecture": "gpt2", "config": {"vocab_size": 256, "n_positions": 64, "n_layer": 1}}


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each micro-batch weighs otherwise, as those of the source jsonl do."""
    torch.set_num_threads(1)
    monkeypatch.setattr(prefetch, "loss_divisor", lambda _source, _batch, _position, first: 2.0 + first % 3 / 7)
    with cpu_as_accelerator(), optimizer_by_kernels():
        yield


def tiny(document: dict[str, Any], level: str, *, samples: bool = False, **training: Any) -> dict[str, Any]:
    """Two micro-batches a step, clipping, a schedule, and a moving average. samples: FP8 levels sample every third step."""
    options = {"steps": 100, "global_batch_size": 2, "micro_batch_size": 1, "gradient_clip": 0.1, "ema_decay": 0.9, **training}
    document = with_training(document, level, sequence_length=16, **options)
    document["model"] = document["model"] | {"hidden_size": 16}
    if LEVELS[level].has_own_fp8:
        document["precision"] = {"level": level, "auto_filter": False} | ({"statistics_every": 3} if samples else {})
    return document


def trained(
    document: dict[str, Any],
    folder: Path,
    recorder: TapeRecorder | None,
    num_steps: int = NUM_STEPS,
    *,
    records_each_step: bool = False,
) -> tuple[list[FinishedStep], list[Any], Trainer]:
    """Take steps. Returns them, all that the trainer would save, and the trainer."""
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        trainer = Trainer(resolve(JobSpec.model_validate(document), RankEnv()), mesh, Recorder(), folder)
        trainer.job.graph = StepGraph(trainer.model, trainer.optimizer, trainer.job.health, recorder)
        trainer.log.num_steps = num_steps + 1
        for _ in range(num_steps):
            trainer.step()
            if records_each_step:
                trainer.job.graph._recordings.clear()
                forget_addresses(trainer.optimizer)
        trainer.batches.close()
        steps = list(trainer.log.flush().steps)
        saved = (exact_state_dict(trainer.model), trainer.optimizer.state_dict(), trainer.job.average.state_dict())
    return steps, tree_flatten(saved)[0], trainer


def forget_addresses(optimizer: torch.optim.Optimizer) -> None:
    """Let the next recording send its table of addresses, which belongs to it, whether or not memory was reused."""
    for step in optimizer._stepper.fused_steps.values() if isinstance(optimizer, LowBitOptimizer) else ():
        for name in [name for name in step.sent if name[0] != "groups"]:
            del step.sent[name]


def are_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def numbers(steps: list[FinishedStep]) -> list[tuple[float, float, float]]:
    return [(step.loss, step.gradient_norm, step.learning_rate) for step in steps]


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize(
    ("level", "num_steps"), [("O2", 3), *(pytest.param(level, NUM_STEPS, marks=pytest.mark.matrix) for level in LEVELS)]
)
def test_replayed_steps_are_the_same(
    tmp_path: Path, spec_document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, level: str, num_steps: int
) -> None:
    """O2: a step that is launched, one that is recorded and one that is replayed. By level: NUM_STEPS, with samples."""
    document, num_launched = tiny(spec_document, level, samples=num_steps == NUM_STEPS), WARM_UP_STEPS
    if num_steps < NUM_STEPS:
        document["precision"]["statistics_every"], num_launched = 0, 1
        monkeypatch.setattr(step_graph, "WARM_UP_STEPS", num_launched)
    expected, expected_state, _ = trained(document, tmp_path / "launched", None, num_steps)
    steps, state, _ = trained(document, tmp_path / "replayed", recorder := TapeRecorder(), num_steps)
    num_kinds = 2 if document["precision"].get("statistics_every") else 1
    num_parts = 3 * (num_steps - num_launched)
    assert (len(recorder.tapes), recorder.num_replays) == (3 * num_kinds, num_parts - 3 * num_kinds)
    assert numbers(steps) == numbers(expected)
    assert len({step.learning_rate for step in steps}) == num_steps
    assert len(state) == len(expected_state)
    assert all(map(are_equal, state, expected_state))


@pytest.mark.system
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_replayed_steps_keep_the_same_activations_in_fp8(tmp_path: Path, spec_document: dict[str, Any], family: str) -> None:
    document = tiny(spec_document, "O2", saved_activations="fp8")
    if family == "llama":
        document["model"] = document["model"] | {"family": "llama", "intermediate_size": 32, "num_key_value_heads": 1}
    expected, expected_state, _ = trained(document, tmp_path / "launched", None)
    steps, state, _ = trained(document, tmp_path / "replayed", recorder := TapeRecorder())
    assert recorder.num_replays > 0
    assert numbers(steps) == numbers(expected)
    assert all(map(are_equal, state, expected_state))


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize("level", LEVELS)
def test_the_host_gives_each_step_the_same_numbers(tmp_path: Path, spec_document: dict[str, Any], level: str) -> None:
    """Two steps, recorded one after the other, differ in no number; the message names the op of the first that does."""
    recorder = TapeRecorder()
    trained(tiny(spec_document, level), tmp_path, recorder, 6, records_each_step=True)
    *_, first_pass, further_pass, update, first_again, further_again, update_again = (
        tape.host_values() for tape in recorder.tapes
    )
    for one, other in ((first_pass, first_again), (further_pass, further_again), (update, update_again)):
        assert [pair for pair in zip_longest(one, other) if pair[0] != pair[1]][:1] == []


@pytest.mark.matrix
def test_a_learning_rate_that_a_recording_keeps_is_seen(
    tmp_path: Path, spec_document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tiny(spec_document, "fp32", ema_decay=None)
    expected, expected_state, _ = trained(document, tmp_path / "launched", None, 6)
    monkeypatch.setattr(LowBitOptimizer, "send_hyperparameters", lambda _optimizer: None)
    steps, state, _ = trained(document, tmp_path / "replayed", TapeRecorder(), 6)
    assert numbers(steps[:4]) == numbers(expected[:4])
    assert not all(map(are_equal, state, expected_state))


@pytest.mark.parametrize("is_counted_by", ["device", "host"])
def test_each_replay_draws_new_numbers(monkeypatch: pytest.MonkeyPatch, is_counted_by: str) -> None:
    """Three additions to an FP8 gradient. Counted by the host, as an int, a replay would draw the numbers of its recording."""

    def work_on(gradient: Float8Gradient) -> Tensor:
        gradient.add_(torch.linspace(-1, 2, 512))
        return gradient.dequant_scale

    def accumulate(position: RoundingPosition, codes: Tensor, dequant_scale: Tensor, other: Tensor, alpha: float) -> None:
        position.count += 1
        kernels.accumulate_(codes, dequant_scale, other, alpha, (position.seed, position.count, position.stream))

    launched, replayed = (Float8Gradient.quantize(torch.linspace(3, 1, 512), RoundingPosition(1, 2)) for _ in range(2))
    for _ in range(3):
        work_on(launched)
    if is_counted_by == "host":
        monkeypatch.setattr(RoundingPosition, "count", 0)
        monkeypatch.setattr(RoundingPosition, "accumulate_", accumulate)
    _, replay = TapeRecorder().record(lambda: work_on(replayed))
    replay()
    replay()
    assert are_equal(launched.codes, replayed.codes) is (is_counted_by == "device")


def test_random_numbers_of_a_model_follow_the_seed_of_the_moment() -> None:
    graph = StepGraph(torch.nn.Linear(2, 1), None, recorder=(recorder := TapeRecorder()))
    drawn = []
    for seed in range(6):
        graph.begin_step()
        torch.manual_seed(seed)
        drawn.append(float(graph._run("draw", lambda _samples: torch.rand(3).sum())))
        graph.after_step()
    assert recorder.num_replays == 2
    assert drawn == [float(torch.rand(3, generator=torch.Generator().manual_seed(seed)).sum()) for seed in range(6)]


def test_a_kind_of_step_not_met_before_drops_all_recordings() -> None:
    """So that it does not run next to the memory of the others; it is recorded when it comes again."""
    model, _ = initialize(torch.nn.Sequential(torch.nn.Linear(32, 32)), None, "te", auto_filter=False)
    graph = StepGraph(model, None, recorder=(recorder := TapeRecorder()))

    def run(num_steps: int) -> tuple[int, int, int]:
        for _ in range(num_steps):
            graph.begin_step()
            graph._run("pass", lambda _samples: torch.ones(()) * 2)
            graph.after_step()
        return len(recorder.tapes), recorder.num_replays, recorder.num_forgotten

    assert run(5) == (1, 1, 0)
    model[0].fallback = Fallback.DEMOTED
    assert run(1) == (1, 1, 1)
    assert run(2) == (2, 2, 1)


def document_of(family: str, document: dict[str, Any], level: str, folder: Path) -> dict[str, Any]:
    """A small job of a family; those of images get a file of them."""
    tiny_document = tiny(document, level)
    if family in ("gpt", "llama"):
        llama = {"family": "llama", "intermediate_size": 32, "num_key_value_heads": 1}
        return tiny_document | {"model": tiny_document["model"] | (llama if family == "llama" else {})}
    if family == "roberta":
        return tiny_document | {"model": {"preset": "roberta-tiny", "hidden_size": 32, "num_layers": 1, "num_heads": 2}}
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (32, 16, 16, 3), dtype=np.uint8)
    np.savez(folder / "images.npz", images=images, labels=np.arange(32) % 4)
    model = {"deit": {"preset": "deit-tiny", "hidden_size": 32, "num_layers": 2, "num_heads": 2}, "swin": {"depths": [1, 1]}}
    sizes = {"preset": f"{family}-tiny", "image_size": 16, "patch_size": 2, "num_classes": 4, "drop_path_rate": 0.5}
    training = {name: value for name, value in tiny_document["training"].items() if name != "sequence_length"}
    data = {"source": "images", "path": str(folder / "images.npz")}
    return tiny_document | {"model": sizes | model[family], "data": data, "training": training}


@pytest.mark.matrix
@pytest.mark.parametrize("level", ["bf16-amp", "O2"])
@pytest.mark.parametrize("family", [family for family in families_with("cuda_graphs") if family != "gpt"])
def test_each_family_that_is_recorded_is_replayed(
    tmp_path: Path, spec_document: dict[str, Any], family: str, level: str
) -> None:
    """With drop path in those of images, and dropout in RoBERTa. A capture refuses tensors that come from the host."""
    document = document_of(family, spec_document, level, tmp_path)
    expected, expected_state, _ = trained(document, tmp_path / "launched", None, 5)
    steps, state, trainer = trained(document, tmp_path / "replayed", recorder := TapeRecorder(), 5)
    assert reason_against("training.cuda_graph", trainer.config) is None
    assert recorder.num_replays == 3
    assert numbers(steps) == numbers(expected)
    assert all(map(are_equal, state, expected_state))
    first_pass, further_pass, _ = recorder.tapes  # the optimizer sends its tables from pinned memory, which is captured
    assert first_pass.made_on_the_host() + further_pass.made_on_the_host() == []


def test_what_the_host_makes_is_seen() -> None:
    with Tape() as tape:
        torch.arange(3) + torch.tensor([1, 2, 3]) + torch.tensor(1)
    assert tape.made_on_the_host() == ["[1, 2, 3]"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"resources": {"workers": 2}, "parallelism": {"zero_stage": 3}},
            "parallelism.zero_stage 3 gives weights other memory",
        ),
        ({"model": GPT2}, "passes of model.family huggingface"),
    ],
)
def test_a_job_that_is_not_recorded_says_why(spec_document: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    document = tiny(spec_document, "bf16-amp", ema_decay=None) | changes
    config = resolve(JobSpec.model_validate(document), RankEnv(world_size=document.get("resources", {}).get("workers", 1)))
    model, optimizer = initialize(torch.nn.Sequential(torch.nn.Linear(32, 32)), None, "bf16-amp")
    alone = Axes.of_group(torch.device("cpu"))
    graph = step_graph.step_graph_of(config, model, optimizer, None, torch.device("cuda"), alone)
    [event] = graph.start_events()
    assert (event.type, graph.recorder) == ("training.not_graphed", None)
    assert event.message.startswith(f"steps run without CUDA graphs: {reason}")


def save_reason(rank: int, port: int, document: dict[str, Any], folder: str) -> None:
    """The optimizer of rank 0 has kernels."""
    env = RankEnv(rank=rank, world_size=2, master_port=port)
    config = resolve(JobSpec.model_validate(document), env)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), "O2")
    assert isinstance(optimizer, LowBitOptimizer)
    optimizer.fused = rank == 0
    with Mesh(env, torch.device("cpu")) as mesh:
        graph = step_graph.step_graph_of(config, model, optimizer, None, torch.device("cuda"), mesh)
    torch.save((graph.recorder, graph.reason), Path(folder, f"{rank}.pt"))


@pytest.mark.system
def test_no_rank_records_where_one_cannot(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = tiny(spec_document, "O2") | {"resources": {"workers": 2}}
    run_ranks(save_reason, (free_port(), document, str(tmp_path)), 2)
    for recorder, reason in saved_by_ranks(tmp_path, 2):
        assert recorder is None
        assert reason.startswith("the host waits for the optimizer")


def test_samples_of_another_shape_are_refused() -> None:
    graph = StepGraph(torch.nn.Linear(2, 1), None, recorder=TapeRecorder())

    def run(num_samples: int) -> Tensor:
        graph.begin_step()
        graph.after_step()
        return graph._run("sum", lambda samples: samples["x"].sum() / 2, {"x": torch.ones(num_samples)})

    assert [float(run(4)) for _ in range(6)] == [2.0] * 6
    with pytest.raises(InvalidConfig, match=r"'x' of a micro-batch is torch.float32 \(5,\), and was torch.float32 \(4,\)"):
        run(5)


def test_the_table_of_groups_stays_where_it_is() -> None:
    parameter = torch.nn.Parameter(torch.ones(128))
    parameter.grad = torch.ones(128)
    optimizer = LowBitAdamW([parameter])
    optimizer.step()
    [step] = optimizer._stepper.fused_steps.values()
    before = step.sent["groups", parameter.device][1]
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.send_hyperparameters()
    assert step.sent["groups", parameter.device][1] is before
    assert before[0, 0] == 0.25


@pytest.mark.system
def test_a_table_lives_as_long_as_the_recording_that_reads_it() -> None:
    def send(content: list[list[int]]) -> Tensor:
        return tables.send("of a test", content, torch.device("cpu"), torch.int64)

    table = weakref.ref(send([[1, 2]]))
    with holding() as held:
        assert send([[1, 2]]) is table()
    send([[3, 4]])
    assert table() is not None
    held.clear()
    assert table() is None

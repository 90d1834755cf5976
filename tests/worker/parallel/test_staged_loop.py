"""`parallelize(pipeline=2)` in a loop of one's own on real ranks (gloo): the bits of one process in the plainest loop.

A tied weight is the exception: its two gradients are added up in another order. So are ranks that also divide layers.
"""

from functools import cache
from typing import Any

import pytest
import torch

from octet.api_schemas.levels import LEVELS
from octet.worker import parallelize
from octet.worker.fp8.loss_scaling import STATE_BUFFER
from octet.worker.parallel.pipeline.parallel import check_level
from tests.worker.parallel.compare import chosen_cases, found_by_ranks
from tests.worker.parallel.staged_loop_runs import (
    MICRO_BATCHES,
    STEPS,
    TIED,
    Case,
    Result,
    make,
    train,
    train_plainly,
    work_of_four,
    work_of_two,
)
from tests.worker.parallel.tensor_runs import LOSS_TOLERANCE, NORM_TOLERANCE

pytestmark = pytest.mark.system

FAST: list[Case] = [
    ("llama", "O3-split", "interleaved"),
    ("gpt", "O2", "1f1b"),
    ("sequence", "te", "interleaved"),
    ("sequence", "bf16-amp", "1f1b"),
    ("tied layers", "fp32", "1f1b"),
    ("layers", "torch", "1f1b"),
]
STAGED_LEVELS = [name for name, level in LEVELS.items() if level.engine != "torchao"]
CASES: list[Case] = [
    *[("llama", level, "1f1b") for level in STAGED_LEVELS],
    *[("sequence", level, "interleaved") for level in STAGED_LEVELS],
    *[("layers", level, schedule) for level in STAGED_LEVELS for schedule in ("1f1b", "interleaved")],
    *[("tied layers", level, "interleaved") for level in ("fp32", "te", "O2", "O3-split", "fp16-amp")],
]
DATA_CASES = [("layers", "O3-split", 1)]
ALL_DATA_CASES = [
    ("layers", "torch", 0),  # torch's own optimizer is not divided
    *[("layers", level, stage) for level in ("te", "O2", "O3", "O3-split") for stage in (0, 1)],
]


def _parameters(cases: list[Any], fast: list[Any]) -> list[Any]:
    return [*fast, *[pytest.param(*case, marks=pytest.mark.matrix) for case in cases if case not in fast]]


alone = cache(train_plainly)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Result]:
    cases = chosen_cases(request, test_stages_train_as_one_process_does, ("kind", "level", "schedule"))
    return found_by_ranks(work_of_two, 2, tmp_path_factory.mktemp("two"), cases)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Result]:
    with_data = chosen_cases(request, test_stages_with_data_ranks_train_as_data_ranks_alone, ("kind", "level", "zero_stage"))
    with_tensor = chosen_cases(request, test_stages_whose_layers_ranks_divide_train_as_one_process_does, ("sequence",))
    others = chosen_cases(request, test_other_layouts_train_as_one_process_does, ("layout",))
    cases = [tuple(with_data), tuple(sequence for (sequence,) in with_tensor), tuple(layout for (layout,) in others)]
    return found_by_ranks(work_of_four, 4, tmp_path_factory.mktemp("four"), cases)


@pytest.mark.parametrize(("kind", "level", "schedule"), _parameters(CASES, FAST))
def test_stages_train_as_one_process_does(two: list[Result], kind: str, level: str, schedule: str) -> None:
    """To the bit: losses, norms, evaluation, and every tensor of the model."""
    expected, [first, last] = alone(kind, level), [result[kind, level, schedule] for result in two]
    assert first["losses"] == [None] * STEPS
    assert first["evaluation"] is None
    assert first["norms"] == last["norms"]
    assert first["state"].keys() | last["state"].keys() == expected["state"].keys()
    if kind in TIED:
        tolerance = LOSS_TOLERANCE[LEVELS[level].gemm.replace("fp16", "bf16")]
        assert last["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert last["evaluation"] == pytest.approx(expected["evaluation"], rel=tolerance)
        (embedding,) = [
            held for name, held in first["state"].items() if name.endswith("embedding.weight") and "pos" not in name
        ]
        assert torch.equal(embedding, last["state"]["head.weight"])
        return
    assert first["state"].keys() & last["state"].keys() <= {STATE_BUFFER}
    assert (last["losses"], last["norms"], last["evaluation"]) == tuple(
        expected[name] for name in ("losses", "norms", "evaluation")
    )
    assert _differences(first["state"] | last["state"], expected["state"]) == []


def _differences(state: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [name for name, held in state.items() if not torch.equal(held, expected[name])]


def test_step_without_stages_is_the_plain_loop() -> None:
    parallel = parallelize(*make("sequence", "O2"), micro_batches=MICRO_BATCHES)
    found, expected = train(parallel), alone("sequence", "O2")
    assert _differences(found.pop("state"), expected["state"]) == []
    assert found == {name: value for name, value in expected.items() if name != "state"}


def test_a_batch_of_a_language_model_is_weighted_by_its_targets() -> None:
    """The mean is over all targets of the batch, however micro-batches divide it. Jobs weight batches the same way."""
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[:2, 3:] = -100
    batch = {"tokens": tokens[:, :-1], "targets": targets, "num_targets": (targets != -100).sum(1)}
    losses = []
    for number in (1, 4):
        loss = parallelize(*make("gpt", "fp32"), micro_batches=number).step(batch)
        assert loss is not None
        losses.append(float(loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_run_goes_on_from_the_ranks_own_states_and_in_another_layout_from_the_whole(two: list[Result]) -> None:
    """To the bit."""
    ends = [result["resumed"] for result in two]
    for result in ends:
        assert _differences(result["from its own"].pop("state"), result["on"]["state"]) == []
    whole = ends[0]["on"]["state"] | ends[1]["on"]["state"]
    for result in ends:
        assert _differences(result["interleaved from the whole"].pop("state"), whole) == []
        del result["on"]["state"]
        assert result["on"] == result["from its own"] == result["interleaved from the whole"]


def test_calls_of_step_accumulate(two: list[Result]) -> None:
    """Gradients of tied weights, too, which are added up once."""
    for result in two:
        once, twice = result["accumulated"]
        assert twice == pytest.approx(2 * once, rel=1e-6)


def test_stages_drop_out_elements_of_their_own(two: list[Result]) -> None:
    masks = [mask for result in two for mask in result["draws"]["masks"]]
    assert len(masks) == 4 * MICRO_BATCHES
    assert all(mask != other for index, mask in enumerate(masks) for other in masks[:index])
    assert two[0]["draws"]["scripts"] == two[1]["draws"]["scripts"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("uneven", "the batch has 6 samples and micro_batches is 4; allowed: multiples of 4"),
        ("targets", "different numbers of samples: inputs 8, targets of loss_fn 4"),
        ("no loss", "got a Tensor for a Network without loss_fn"),
        ("call", "this rank holds 1 of 2 stages of the model; allowed: Parallel.step and Parallel.evaluate"),
        ("step after clipping", "allowed: optimizer.step() or optimizer.zero_grad() in between"),
        ("blocks", "that the model holds itself, here layers. Change blocks"),
        ("no blocks", "the model a Network, and blocks is not set; allowed: a gpt or llama of ours, an nn.Sequential"),
        ("family", "a GPT, which knows its own; allowed: blocks for models that are not ours"),
        ("stages", "the model has 4 blocks and the pipeline 6 stages; allowed: at least one block for each stage"),
        ("zero-bubble", "leaves out the hooks that hold gradients in FP8. Set schedule to interleaved"),
        ("schedule", "schedule is 'gpipe'; allowed: 1f1b, interleaved"),
        ("micro_batches", "micro_batches is 1, pipeline 2 and schedule 1f1b; allowed: 2 or more"),
        ("none", "pipeline is 2 and micro_batches is not set; allowed: 2 or more"),
        ("multiple", "micro_batches is 5, pipeline 2 and schedule interleaved; allowed: a multiple of 2"),
        ("context", "context: got 2; allowed: 1 with pipeline, which is combined with tensor and data parallel ranks"),
        ("zero", "zero_stage: got 2; allowed: 0 or 1 with pipeline"),
        ("ranks", "got pipeline 3 with 2 ranks; allowed: 1, or a divisor of the ranks"),
        ("runs", "stages_per_rank is 2 and schedule 1f1b; allowed: 1 with 1f1b, 2 or more with interleaved"),
        ("without", "schedule is set and pipeline is 1; allowed: 2 or more"),
        ("empty", "stage 1 of the pipeline, 2, 3, holds no parameters; allowed: stages that train some"),
        ("fused", "saves memory by fuse_loss"),
        ("offloaded", "saves memory by fuse_loss, keep_activations_in_fp8, release_gradients or offload_optimizer"),
        ("used", "the optimizer has taken 1 steps with whole parameters"),
        ("compiled", "compiled; allowed with pipeline: models that are not"),
    ],
)
def test_what_cannot_be_divided_is_refused_on_all_ranks(two: list[Result], asked: str, said: str) -> None:
    for result in two:
        assert said in result["refusals"][asked]


@pytest.mark.matrix
def test_torchaos_layers_are_refused_in_stages() -> None:
    with pytest.raises(ValueError, match="got ao; allowed: with pipeline: every level but ao"):
        check_level(make("sequence", "ao")[0])


@pytest.mark.parametrize(("kind", "level", "zero_stage"), _parameters(ALL_DATA_CASES, DATA_CASES))
def test_stages_with_data_ranks_train_as_data_ranks_alone(four: list[Result], kind: str, level: str, zero_stage: int) -> None:
    """At the same stage of ZeRO, to the bit; norms are summed over other ranks."""
    results = [result[kind, level, zero_stage] for result in four]
    for both, data in results:
        assert both["norms"] == pytest.approx(data["norms"], rel=1e-6)
        assert _differences(both["state"], data["state"]) == []
    for both, data in results[2:]:
        assert (both["losses"], both["evaluation"]) == (data["losses"], data["evaluation"])


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_stages_whose_layers_ranks_divide_train_as_one_process_does(four: list[Result], sequence: bool) -> None:
    expected, [*_, third, fourth] = alone("llama", "O3-split"), [result["tensor", sequence] for result in four]
    assert third["losses"] == fourth["losses"] == pytest.approx(expected["losses"], rel=LOSS_TOLERANCE["fp8"])
    assert third["norms"] == pytest.approx(expected["norms"], rel=NORM_TOLERANCE["fp8"])
    assert third["evaluation"] == pytest.approx(expected["evaluation"], rel=LOSS_TOLERANCE["fp8"])
    for result in four:
        assert "each have the logits of some tokens of the vocabulary" in result["own loss", sequence]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["own plan", "four stages"])
def test_other_layouts_train_as_one_process_does(four: list[Result], layout: str) -> None:
    """Four stages to the bit; ranks that divide layers by a plan of somebody's own add up partial sums."""
    expected, found = alone("layers", "te"), [result[layout] for result in four]
    assert all(result["norms"] == found[0]["norms"] for result in found)
    if layout == "own plan":
        assert found[3]["losses"] == pytest.approx(expected["losses"], rel=LOSS_TOLERANCE["fp8"])
        assert found[3]["norms"] == pytest.approx(expected["norms"], rel=NORM_TOLERANCE["fp8"])
        return
    assert [result["losses"] for result in found] == [*[[None] * STEPS] * 3, expected["losses"]]
    assert found[0]["norms"] == expected["norms"]
    merged = {name: held for result in found for name, held in result["state"].items()}
    assert merged.keys() == expected["state"].keys()
    assert _differences(merged, expected["state"]) == []

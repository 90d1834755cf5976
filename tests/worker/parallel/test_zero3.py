"""ZeRO stage 3 over real ranks (gloo): weights of blocks are divided, and training gives the bits of one process."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from octet.api_schemas import CheckpointReport, JobSpec, Layout
from octet.api_schemas.levels import LEVELS
from octet.worker import checkpoint, fuse_loss, initialize, memory_report, plain_state_dict
from octet.worker.checkpoint.resume import resume
from octet.worker.common.config import RankEnv, resolve
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.fp8.weight import stored
from octet.worker.kernels.torch_private import leave_the_compiler_unloaded
from octet.worker.mesh import Axis, Mesh
from octet.worker.mesh.axes import Axes
from octet.worker.models import build_model
from octet.worker.models.blocks import repeated_blocks
from octet.worker.models.wrapped import vocabulary_layers
from octet.worker.parallel import Parallel
from octet.worker.parallel.sharded_blocks import divide_model
from octet.worker.prepare.blocks import checkpoint_blocks, compile_blocks
from octet.worker.train.loop import Trainer
from tests.golden.record import digest
from tests.golden.record import document as golden_job
from tests.kit.ports import free_port
from tests.kit.ranks import refusal_of, run_ranks, saved_by_ranks
from tests.kit.text import write_corpus
from tests.kit.training import Recorder
from tests.worker.parallel.reference import (
    MAX_ELEMENTS,
    STEPS,
    DeepNet,
    Net,
    Result,
    loss_of,
    make,
    parallel_on,
    reference,
    set_share,
    state_of,
    step_on_ranks,
)

pytestmark = pytest.mark.system
AXES = {"data": 2, "world": 4}
"""Axes of one mesh of 4 ranks, with their sizes."""
MEASURED = ("world", "O3-split", 3, "checkpointed")
USUAL = [("data", "te", 3, "plain"), MEASURED]
"""Cases of `make test`: wide weights, and codes with residuals."""
CASES = [
    pytest.param(axis, level, stage, kind, marks=() if (axis, level, stage, kind) in USUAL else pytest.mark.matrix)
    for axis in AXES
    for level in LEVELS
    for stage in (2, 3)
    for kind in ("plain", "checkpointed", "compiled")
]
NUM_DIVIDED = 3 * (32 * 80 + 32 * 64) + 32 * 80
"""Elements of the converted weights in 7 layers. A weight that two blocks share is not converted, and stays whole."""
COUNTED = [("fp32", 0), ("O1", 0), ("O2", 0), *((level, stage) for level in ("bf16-amp", "O3") for stage in (1, 3))]
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 256, "max_sequence_length": 16}
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "gpt": SIZES,
    "llama": {"family": "llama", "num_key_value_heads": 2, "intermediate_size": 64, **SIZES},
    "qwen3": {
        "family": "huggingface",
        "architecture": "qwen3",
        "config": {
            **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
            **{"num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 16, "tie_word_embeddings": True},
        },
    },
}
JOB = {"name": "zero3", "data": {"source": "tokens", "path": "/data"}, "training": {"steps": 1, "sequence_length": 16}}
LANGUAGE = [
    ("data", "gpt", True),
    ("world", "gpt", False),
    ("world", "llama", True),
    ("data", "llama", False),
    ("data", "qwen3", True),
]
"""Axis, model, and whether its loss is computed without logits; else the head multiplies in FP8 where it is not tied."""
RESUMED = [("world", 3), ("alone", 0)]
"""Axes and stages at which a run goes on."""


def prepared(axis: Axis, level: str, stage: int = 3, kind: str = "plain", wide_dtype: torch.dtype = torch.float32) -> Parallel:
    model, optimizer = make(level, axis.rank, axis.size, DeepNet)
    if kind == "checkpointed":
        checkpoint_blocks(model, "full")
    if kind == "compiled":
        compile_blocks(model, backend="aot_eager")
    return Parallel(model, optimizer, Axes.of_data(axis), zero_stage=stage, max_elements=MAX_ELEMENTS, wide_dtype=wide_dtype)


def trained(axis: Axis, level: str, stage: int, kind: str) -> Result:
    parallel = prepared(axis, level, stage, kind)
    losses = []
    for step in range(STEPS):
        losses.append(step_on_ranks(parallel, step))
        memory_bytes = memory_report(parallel.model, parallel.optimizer, converted_only=LEVELS[level].has_own_fp8)
        parallel.optimizer.zero_grad()
    return {"losses": losses, "state": state_of(parallel.model, parallel.optimizer), "memory_bytes": memory_bytes}


def in_a_pass(axis: Axis) -> Result:
    """Return the bytes of the first block's weight in memory, and the bytes gathered.

    In memory: before, inside and after passes. Gathered: by the backward pass, and by the step's `publish`.
    """
    parallel = prepared(axis, "O3")
    weight = parallel.model.blocks[0].up.weight
    held = {"before": stored(weight).untyped_storage().nbytes()}
    parallel.model.blocks[0].up.register_forward_hook(lambda *_: held.update(inside=stored(weight).untyped_storage().nbytes()))
    loss = loss_of(parallel.model, axis.rank, 0, 0)
    held["between"] = stored(weight).untyped_storage().nbytes()
    axis.sent_bytes.clear()
    loss.backward()
    held["after"] = stored(weight).untyped_storage().nbytes()
    gathered = axis.sent_bytes["gather", "float8_e4m3fn"]
    parallel.synchronize()
    parallel.optimizer.step()
    axis.sent_bytes.clear()
    parallel.publish()
    return {"held": held, "gathered": gathered, "published": axis.sent_bytes["gather", "float8_e4m3fn"]}


def in_bf16(axis: Axis) -> Result:
    parallel = prepared(axis, "te", wide_dtype=torch.bfloat16)
    axis.sent_bytes.clear()
    losses = [step_on_ranks(parallel, 0)]
    sent = dict(axis.sent_bytes)
    parallel.optimizer.zero_grad()
    seen = []
    parallel.model.blocks[0].up.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    losses.append(step_on_ranks(parallel, 0))
    return {"losses": losses, "sent": sent, "seen": seen[0]}


def counted(axis: Axis, level: str, stage: int) -> dict[str, int]:
    """Bytes that a rank sends in a step for converted layers alone, by collective."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2))) for _ in range(2)]
    options = {"convert_heads": True} if LEVELS[level].has_own_fp8 else {}
    model, optimizer = initialize(nn.Sequential(*blocks), opt_level=level, optimizer_name="adamw", **options)
    assert optimizer is not None
    parallel = Parallel(model, optimizer, Axes.of_data(axis), zero_stage=stage)
    axis.sent_bytes.clear()
    model(torch.ones(16, 128)).square().mean().backward()
    parallel.synchronize()
    optimizer.step()
    parallel.publish()
    sent: Counter[str] = Counter()
    for (collective, _), num_bytes in axis.sent_bytes.items():
        sent[collective] += num_bytes
    return sent


def network(name: str) -> Any:
    """Return a language model: gpt ties its head to its embedding, llama does not, qwen3 is transformers'."""
    return build_model(JobSpec.model_validate({**JOB, "model": LANGUAGE_MODELS[name]}).model, 0)


def language(axis: Axis, name: str, stage: int, *, is_fused: bool) -> Result:
    """Train a language model. Returns losses, states, and what the ends' weights take between passes."""
    leave_the_compiler_unloaded()
    made = network(name)
    adamw = torch.optim.AdamW(made.parameters(), lr=0.01)
    model, optimizer = initialize(made, adamw, "O2", convert_heads=not is_fused, statistics_every=0, auto_filter=False)
    assert optimizer is not None
    set_share(model, axis.rank, axis.size)
    if is_fused:
        fuse_loss(model)
    parallel = Parallel(model, optimizer, Axes.of_data(axis), zero_stage=stage)
    losses = []
    for step in range(STEPS):
        tokens_BT = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(10 * step + axis.rank))
        batches = [{"tokens": rows[:, :-1], "targets": rows[:, 1:]} for rows in tokens_BT.split(1)]
        passes = [model.loss(batch).loss / 2 for batch in batches]  # both before a backward pass
        with parallel.no_sync():
            passes[0].backward()
        passes[1].backward()
        losses.append([float(loss.detach()) for loss in passes])
        parallel.synchronize()
        optimizer.step()
        parallel.publish()
        optimizer.zero_grad()
    held = [stored(end.weight).untyped_storage().nbytes() for end in vocabulary_layers(model)]
    model.eval()
    with torch.no_grad():
        losses.append([float(model.loss(batch).loss) for batch in parallel.as_many_passes(batches[: axis.rank])])
    digests = [state_of(model, optimizer), digest(plain_state_dict(model))]
    saved = exact_state_dict(model)
    return {
        "losses": losses,
        "state": digests,
        "held": held,
        "is tied": len({saved[key].data_ptr() for key in saved if "token" in key or "head" in key}) == 1,
    }


def evaluated(axis: Axis) -> list[float]:
    """Losses of as many batches as the rank's number, plus one."""
    parallel = prepared(axis, "O3")
    parallel.model.eval()
    with torch.no_grad():
        batches = parallel.as_many_passes(iter(range(axis.rank + 1)))
        return [float(loss_of(parallel.model, axis.rank, 0, batch)) for batch in batches]


def resumed(axes: dict[str, Axis], folder: Path) -> Result:
    """States of a run that was saved in pieces halfway: as it went on, and resumed on other axes and at other stages."""
    axis = axes["world"]
    begun = prepared(axis, "O3")
    step_on_ranks(begun, 0)
    begun.optimizer.zero_grad()
    model, optimizer = begun.state_dicts()
    assert not any(isinstance(held, torch.Tensor) and held.stride() == (0, 0) for held in model.values())
    saved = checkpoint.save(folder, 1, {"model": model, "optimizer": optimizer}, axis)
    assert (saved is not None) == axis.is_first
    axis.sum(0.0)  # until the first rank has written the manifest
    found: Result = {"as saved": state_of(begun.model, begun.optimizer)}
    for name, stage in RESUMED:
        loaded = checkpoint.load_folder(folder / "step_0000000001")
        again = parallel_on(axes[name], "O3", stage, DeepNet)
        resume(again.model, again.optimizer, loaded["model"], loaded["optimizer"])
        found[name, stage] = state_of(again.model, again.optimizer)
        if (name, stage) == ("world", 3):
            step_on_ranks(again, 1)
            found["resumed"] = state_of(again.model, again.optimizer)
    step_on_ranks(begun, 1)
    return found | {"went on": state_of(begun.model, begun.optimizer)}


def codes_alone(axis: Axis) -> list[str]:
    """States after codes were loaded without an optimizer's states, so that masters are made of them: at stages 3 and 0."""
    torch.manual_seed(7)
    other, _ = initialize(DeepNet(), opt_level="O3", convert_heads=True, statistics_every=0)
    saved, states = exact_state_dict(other), []
    for stage in (3, 0):
        again = parallel_on(axis, "O3", stage, DeepNet)
        again.model.load_state_dict(copy.deepcopy(saved))
        for parameter in again.optimizer.param_groups[0]["params"]:
            again.optimizer.follow_weight(parameter)
        states.append(state_of(again.model, again.optimizer))
    return states


def refusals(axis: Axis) -> dict[str, str]:
    parallel = prepared(axis, "O3")
    said = {
        "copy": refusal_of(lambda: copy.deepcopy(parallel.model.blocks)),
        "flat": refusal_of(lambda: parallel_on(axis, "O3", 3)),
    }
    untied, tokens_BT = network("llama"), torch.zeros(1, 16, dtype=torch.int64)
    untied, optimizer = initialize(untied, torch.optim.AdamW(untied.parameters()), "O2")
    divided = Parallel(untied, optimizer, Axes.of_data(axis), zero_stage=3)
    untied.head.weight = untied.token_embedding.weight
    said["tied ends"] = refusal_of(lambda: divided.model.loss({"tokens": tokens_BT, "targets": tokens_BT}))
    own = parallel.model.blocks[1].up.weight
    parallel.model.blocks[1].up.weight = parallel.model.blocks[0].up.weight
    said["tied blocks"] = refusal_of(lambda: loss_of(parallel.model, axis.rank, 0, 0))
    parallel.model.blocks[1].up.weight = own
    parallel.model.blocks[1]._compiled_call_impl = parallel.model.blocks[1]._call_impl  # all that torch's compile() sets
    return said | {"compiled": refusal_of(parallel.publish)}


def job(corpus: str, stage: int) -> JobSpec:
    document = golden_job({"level": "O3"}, Path(corpus), 2)
    training = {"steps": 2, "checkpoint_every": 2, "schedule": {}, "activation_checkpointing": "selective"}
    model = document["model"] | {"num_layers": 2}
    changed = {"model": model, "parallelism": {"zero_stage": stage}, "training": document["training"] | training}
    return JobSpec.model_validate(document | changed)


def run_job(rank: int, port: int, folder: Path, corpus: str, stage: int) -> list[Any]:
    """The losses, and the checkpoint's state, of a job."""
    recorder, env = Recorder(), RankEnv(rank=rank, world_size=2, master_port=port)
    config = resolve(job(corpus, stage), env)
    with Mesh(env, torch.device("cpu"), config.layout) as mesh:
        Trainer(config, mesh, recorder, folder).run()
        mesh.world.sum(0.0)
    [report] = recorder.of(CheckpointReport) if rank == 0 else [None]
    if report is None:
        return []
    state = checkpoint.load_folder(folder / "checkpoints" / report.name)
    return [recorder.losses(), report.loss, digest({"model": state["model"], "optimizer": state["optimizer"]})]


def work(rank: int, ports: list[int], folder: str, corpus: str, cases: list[tuple[str, str, int, str]]) -> None:
    torch.set_num_threads(1)
    found: Result = {}
    if rank < 2:
        found["jobs"] = [run_job(rank, ports[stage], Path(folder, f"job {stage}"), corpus, stage) for stage in (2, 3)]
    with Mesh(RankEnv(rank=rank, world_size=4, master_port=ports[0]), torch.device("cpu"), Layout(4, tensor=2)) as mesh:
        axes = {"data": mesh.data, "world": mesh.world, "alone": Axis("alone", 1, 0, mesh.device)}
        found |= {(name, *case): trained(axes[name], *case) for name, *case in cases}
        found["in a pass"] = in_a_pass(mesh.world)
        found["in bf16"] = in_bf16(mesh.world)
        found["counted"] = {case: counted(mesh.world, *case) for case in COUNTED}
        found["evaluated"] = evaluated(mesh.world)
        found["resumed"] = resumed(axes, Path(folder, "resumed"))
        found["language"] = {
            (axis, name, is_fused, stage): language(axes[axis], name, stage, is_fused=is_fused)
            for axis, name, is_fused in LANGUAGE
            for stage in (2, 3)
        }
        found["codes alone"] = codes_alone(mesh.world)
        found["refusals"] = refusals(mesh.world)
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Result]:
    """Return each rank's results for the selected axes, levels and kinds."""
    folder = tmp_path_factory.mktemp("zero3")
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = [item.callspec.params for item in tests if item.function is test_ranks_train_to_the_bits_of_one_process]
    cases = sorted({tuple(params[name] for name in ("axis", "level", "stage", "kind")) for params in chosen} | {MEASURED})
    corpus = write_corpus(folder / "corpus")
    run_ranks(work, ([free_port() for _ in range(4)], str(folder), str(corpus), cases), 4)
    return saved_by_ranks(folder, 4)


@pytest.mark.parametrize(("axis", "level", "stage", "kind"), CASES)
def test_ranks_train_to_the_bits_of_one_process(results: list[Result], axis: str, level: str, stage: int, kind: str) -> None:
    ranks = [result[axis, level, stage, kind] for result in (results[::2] if axis == "data" else results)]
    expected = reference(level, stage, AXES[axis], DeepNet)
    assert [rank["losses"] for rank in ranks] == expected["losses"]
    assert {rank["state"] for rank in ranks} == {expected["state"]}
    assert expected["losses"][0][-1] < expected["losses"][0][0]


def on_five(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    with Mesh(RankEnv(rank=rank, world_size=5, master_port=port), torch.device("cpu")) as mesh:
        found = {stage: trained(mesh.world, "O3-split", stage, "plain") for stage in (2, 3)}
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.mark.matrix
def test_five_ranks_cut_inside_of_tensors(tmp_path: Path) -> None:
    run_ranks(on_five, (free_port(), str(tmp_path)), 5)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(5)]
    for stage in (2, 3):
        expected = reference("O3-split", stage, 5, DeepNet)
        assert [rank[stage]["losses"] for rank in ranks] == expected["losses"]
        assert {rank[stage]["state"] for rank in ranks} == {expected["state"]}


def test_codes_and_residuals_of_blocks_are_shared_evenly(results: list[Result]) -> None:
    """A byte for each element of both; a released parameter of each layer holds one more."""
    ranks = [result[MEASURED]["memory_bytes"] for result in results]
    assert [rank["weights"] for rank in ranks] == [NUM_DIVIDED // 4 + 7] * 4
    assert [rank["master_weights"] for rank in ranks] == [NUM_DIVIDED // 4] * 4


@pytest.mark.parametrize(("axis", "name", "is_fused"), LANGUAGE)
def test_embedding_and_head_are_divided_and_train_to_the_bits_of_stage_2(
    results: list[Result], axis: str, name: str, is_fused: bool
) -> None:
    """Both stages add each micro-batch's means up at their owners."""
    found = [result["language"] for result in (results[::2] if axis == "data" else results)]
    whole, divided = ([each[axis, name, is_fused, stage] for each in found] for stage in (2, 3))
    assert [each["losses"] for each in divided] == [each["losses"] for each in whole]
    assert {str(each["state"]) for each in divided + whole} == {str(whole[0]["state"])}
    assert [each["is tied"] for each in divided] == [name != "llama"] * len(divided), "a state dict has a tied weight once"
    assert all(max(each["held"]) == 4 < min(whole[0]["held"]) for each in divided), "one element of a released weight"


def test_a_block_is_whole_only_while_it_computes(results: list[Result]) -> None:
    for result in results:
        held = result["in a pass"]["held"]
        assert [held[when] for when in ("before", "between", "after")] == [1, 1, 1]
        assert held["inside"] >= 32 * 80


def test_a_backward_pass_gathers_the_codes_of_blocks_once_and_a_step_none(results: list[Result]) -> None:
    for result in results:
        assert result["in a pass"]["gathered"] == NUM_DIVIDED * 3 // 4
        assert result["in a pass"]["published"] == 0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_in_codes_send_a_quarter_of_an_all_reduce_in_fp32(results: list[Result], level: str) -> None:
    """Scales and amaxes count. An all-reduce sends each share to its owner, and the sum from there."""
    found = results[0]["counted"]
    all_reduce = 2 * 4 * 4 * 128 * 128 * 3 // 4
    assert found["fp32", 0].total() - all_reduce == 4 * 3  # marks, one byte for each gradient, of the ranks that have one
    assert found[level, 0].total() <= 0.27 * all_reduce


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_and_gradients_in_codes_send_a_third_of_bf16_amps(results: list[Result], stage: int) -> None:
    """bf16-amp sends gradients and weights in fp32; in the first stage it could gather bf16, and 0.37 holds then, too."""
    amp, codes = results[0]["counted"]["bf16-amp", stage], results[0]["counted"]["O3", stage]
    assert codes.total() <= 0.37 * amp.total()
    if stage == 1:
        assert codes.total() <= 0.37 * (amp["exchange"] + amp["gather"] / 2)


def test_wide_weights_travel_in_bf16_and_are_rounded_on_every_rank(results: list[Result]) -> None:
    for result in results:
        found = result["in bf16"]
        assert found["sent"]["gather", "bfloat16"] > 0
        assert torch.equal(found["seen"], found["seen"].bfloat16().float())
        assert torch.equal(found["seen"], results[0]["in bf16"]["seen"])
        assert found["losses"][1] < found["losses"][0]


def test_ranks_with_fewer_batches_gather_for_those_with_more(results: list[Result]) -> None:
    model, _ = make("O3", 0, 1, DeepNet)
    model.eval()
    for rank, result in enumerate(results):
        expected = [float(loss_of(model, rank, 0, batch).detach()) for batch in range(rank + 1)]
        assert result["evaluated"] == expected


def test_a_run_resumes_at_another_stage_and_number_of_ranks(results: list[Result]) -> None:
    for result in results:
        found = result["resumed"]
        assert {found[place] for place in RESUMED} == {found["as saved"]}
        assert found["resumed"] == found["went on"] != found["as saved"]


def test_masters_are_made_of_loaded_codes_as_they_are_without_sharding(results: list[Result]) -> None:
    for result in results:
        sharded, whole = result["codes alone"]
        assert sharded == whole


def test_a_job_trains_and_saves_as_at_stage_2(results: list[Result]) -> None:
    second, third = results[0]["jobs"]
    assert third == second


def test_what_cannot_work_is_refused_with_what_to_do(results: list[Result]) -> None:
    said = results[0]["refusals"]
    assert "allowed: copies of models that hold them" in said["copy"]
    assert "repeats no blocks" in said["flat"]
    assert "Compile it before parallelize" in said["compiled"]
    assert "is tied to a weight of another block after" in said["tied blocks"]
    assert "Tie them before parallelize" in said["tied ends"]


def test_what_blocks_share_and_what_is_frozen_stays_whole() -> None:
    model = DeepNet()
    model.blocks[0].up.weight.requires_grad_(False)
    homes = divide_model(model, list(model.blocks), ()).homes
    names = {parameter: name for name, parameter in model.named_parameters()}
    whole = {name for parameter, name in names.items() if parameter not in homes}
    assert whole == {"first.weight", "first.bias", "head.bias", "shift", "blocks.1.down.weight", "blocks.0.up.weight"}
    assert {homes[parameter] for parameter in model.blocks[2].parameters() if parameter in homes} == {2}
    assert divide_model(nn.Sequential(Net()), [], ()).homes == {}


def test_an_end_is_divided_unless_it_is_frozen_or_another_layer_has_its_weight() -> None:
    def divided_ends(model: nn.Module) -> list[str]:
        names = {module: name for name, module in model.named_modules()}
        found = divide_model(model, repeated_blocks(model), vocabulary_layers(model))
        return [names[end] for end in found.ends]

    tied, untied = network("gpt"), network("llama")
    assert divided_ends(tied) == divided_ends(untied) == ["token_embedding", "head"]
    untied.head.weight.requires_grad_(False)
    assert divided_ends(untied) == ["token_embedding"]
    tied.third = nn.Embedding(256, 32)
    tied.third.weight = tied.token_embedding.weight
    assert divided_ends(tied) == []
    assert divided_ends(network("qwen3").network) == ["model.embed_tokens", "lm_head"], "as it is without our wrapper"
    assert divided_ends(DeepNet()) == [], "nobody knows which of its layers these are"

"""Planned states equal live storage: of every family at every level, of a rank of each layout, and of a pipeline's ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from octet.api_schemas import PRESETS, JobSpec
from octet.api_schemas.catalog import model_families
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models import FamilySizes
from octet.api_schemas.models.shapes import ParameterShape
from octet.api_schemas.plan import PlanRequest, TraceRequest, candidates, rows_of, sizes_with
from octet.api_schemas.planned_states import (
    NUM_MEASURES,
    NotPlanned,
    States,
    exchanged_of_experts,
    states_of,
    states_of_rank,
    validated,
)
from octet.client.planner import trace_here
from octet.worker.common.config import RankEnv, resolve
from octet.worker.fp8.experts import unstack_experts
from octet.worker.fp8.layout import layout_of
from octet.worker.kernels import sampling
from octet.worker.mesh import Axes, Mesh
from octet.worker.metrics.memory import memory_report
from octet.worker.models import build_model
from octet.worker.models.blocks import repeated_blocks
from octet.worker.models.initial import parameters_on_meta
from octet.worker.optim import build_optimizer
from octet.worker.optim.schedule import parameter_groups
from octet.worker.parallel import Parallel, on_mesh
from octet.worker.parallel.tensor_plan import plan_of, roles_of
from octet.worker.planning.network import look_at
from octet.worker.planning.trace import sent_on_axes
from octet.worker.prepare.adapters import add_adapters, attach_adapters
from octet.worker.prepare.initialize import prepare
from octet.worker.prepare.memory_options import prepare_steps
from octet.worker.train.build import MovingAverage
from octet.worker.train.loop import Trainer
from tests.kit.families import batch_of
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.text import write_corpus
from tests.kit.training import Recorder

TEXT = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64, "max_sequence_length": 32}
GPT = TEXT | {"hidden_size": 64}  # its matrices have more elements than the smallest that states are quantized of
LLAMA = GPT | {"family": "llama", "num_key_value_heads": 1, "intermediate_size": 176}
IMAGES = {"image_size": 32, "patch_size": 4, "num_channels": 3, "num_classes": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "llama": LLAMA,
    "roberta": TEXT | {"family": "roberta", "hidden_size": 64},
    "deit": IMAGES | {"family": "deit", "hidden_size": 64, "num_layers": 2, "num_heads": 2},
    "swin": IMAGES | {"family": "swin", "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
}
LAYOUTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {}),
    (3, {"zero_stage": 1}),
    (2, {"zero_stage": 2, "wide_communication": "bf16"}),
    (3, {"zero_stage": 3}),
    (2, {"tensor": 2}),
    (4, {"tensor": 2, "zero_stage": 1}),
    (2, {"context": 2, "zero_stage": 2}),
)


def job(model: dict[str, Any], level: str = "O2", workers: int = 1, **parts: Any) -> JobSpec:
    is_vision = model.get("family") in ("deit", "swin")
    training = {"steps": 1, "global_batch_size": 2 * workers, "compile": "off"} | ({} if is_vision else {"sequence_length": 16})
    document = {
        "name": "plan",
        "model": model,
        "precision": {"level": level},
        "data": {"source": "images", "path": "/data.npz"} if is_vision else {"source": "tokens", "path": "/data"},
        "training": training | parts.pop("training", {}),
        "resources": {"workers": workers},
    }
    return JobSpec.model_validate(document | parts)


def planned(spec: JobSpec) -> States:
    return states_of(spec, spec.model.sizes)


def measured(spec: JobSpec, rank: int = 0) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Take a step as a rank of the job. Return the bytes it holds, and sends to its replicas."""
    held, sent, _ = measured_on_axes(spec, rank)
    return held, sent


def measured_on_axes(spec: JobSpec, rank: int) -> tuple[dict[str, int], dict[str, dict[str, int]], dict[str, int]]:
    """Take a step as a rank of the job. Return the bytes it holds, sends to its replicas, and sends on other axes."""
    config = resolve(spec, RankEnv(rank=rank, world_size=spec.resources.workers))
    device, model = torch.device("cpu"), build_model(config.model, 0)
    unstack_experts(model, config.precision)
    optimizer = build_optimizer(parameter_groups(model, config.optimizer), config.optimizer, config.gradient_clip)
    prepared = prepare(model, optimizer, config.precision)
    assert prepared.optimizer is not None
    average = MovingAverage(prepared.model, spec.training.ema_decay)
    prepare_steps(prepared.model, prepared.optimizer, config.training, device)
    mesh = Axes.of_layout(config.layout, rank, device)
    parallel = on_mesh(prepared.model, prepared.optimizer, mesh, config.parallelism)
    for axis in (parallel.replicas, parallel.axes.expert_replicas):
        axis.sent_bytes.clear()
    sent_before = sent_on_axes(parallel.axes)
    batch, num_passes = batch_of(spec.model.family), config.batch.num_micro_batches
    for index in range(num_passes):
        with parallel.no_sync(index < num_passes - 1):
            model.loss(batch).loss.backward()
    finish(parallel, spec)
    held = memory_report(prepared.model, prepared.optimizer)
    held["other"] += average.num_bytes
    sent: dict[str, dict[str, int]] = {}
    for axis in {parallel.replicas, parallel.axes.expert_replicas}:
        for (collective, dtype), num_bytes in axis.sent_bytes.items():
            sent.setdefault(collective, {}).setdefault(dtype, 0)
            sent[collective][dtype] += num_bytes
    return held, sent, dict(sent_on_axes(parallel.axes) - sent_before)


def finish(parallel: Parallel, spec: JobSpec) -> None:
    parallel.synchronize()
    if spec.training.gradient_clip is not None:
        parallel.clip_grad_norm_(1.0)
    parallel.optimizer.step()
    parallel.publish()


def on_fake_ranks(spec: JobSpec) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    dist.init_process_group("fake", rank=0, world_size=spec.resources.workers, store=FakeStore())
    try:
        return measured(spec)
    finally:
        dist.destroy_process_group()


def test_constants_are_those_of_the_runtime() -> None:
    assert NUM_MEASURES == sampling.NUM_MEASURES


@pytest.mark.parametrize("preset", [name for name, sizes in PRESETS.items() if sizes.num_parameters < 1_500_000_000])
def test_shapes_add_up_to_the_parameters_of_a_preset(preset: str) -> None:
    sizes = PRESETS[preset]
    shapes = own_shapes(sizes)
    assert sum(torch.Size(shape.shape).numel() for shape in shapes) == sizes.num_parameters


def own_shapes(sizes: FamilySizes) -> list[ParameterShape]:
    shapes = sizes.parameters()
    assert shapes is not None
    return [shape for shape in shapes if shape.tied_to is None]


@pytest.mark.parametrize("family", MODELS)
def test_shapes_are_those_of_the_network(family: str) -> None:
    spec = job(MODELS[family]).model
    with parameters_on_meta():
        model = build_model(spec, 0)
    linear = {f"{name}.weight" for name, module in model.named_modules() if layout_of(module) is not None}
    homes = {id(parameter): index for index, block in enumerate(repeated_blocks(model)) for parameter in block.parameters()}
    found = [
        (name, tuple(parameter.shape), name in linear, homes.get(id(parameter))) for name, parameter in model.named_parameters()
    ]
    assert [(shape.name, shape.shape, shape.is_linear, shape.block) for shape in own_shapes(spec.sizes)] == found
    assert spec.sizes.buffer_bytes == sum(buffer.nbytes for buffer in model.buffers())
    shapes = spec.sizes.parameters()
    assert shapes is not None
    assert [shape.name for shape in shapes if shape.is_linear] == [
        f"{name}.weight" for name, module in model.named_modules() if layout_of(module) is not None
    ]


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_tensor_ranks_divide_what_the_networks_plan_divides(family: str) -> None:
    spec = job(MODELS[family]).model
    model = build_model(spec, 0)
    roles = roles_of(model, plan_of(model))
    dims = {"column": 0, "column of 3": 0, "embedding": 0, "head": 0, "row": 1}
    shapes = spec.sizes.parameters()
    assert shapes is not None
    for shape in shapes:
        role = roles.get(shape.layer)
        is_whole = role is None or (role == "row" and len(shape.shape) == 1)
        assert shape.divided_dim == (None if is_whole else dims[role or ""]), shape.name


FAMILIES_AND_LEVELS = [
    pytest.param(family, level, marks=() if family == "llama" or level in ("te", "O3-split-8bit") else pytest.mark.matrix)
    for family in MODELS
    for level, row in LEVELS.items()
    if row.engine == "octet"
]
"""llama at every level, and each family at two: wide states at te, codes at O3-split-8bit."""


@pytest.mark.parametrize(("family", "level"), FAMILIES_AND_LEVELS)
def test_one_rank_of_every_family_at_every_level(family: str, level: str) -> None:
    spec = job(MODELS[family], level)
    assert planned(spec).held == measured(spec)[0]


QWEN3 = {
    "family": "huggingface",
    "architecture": "qwen3",
    "config": {
        **{"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
        **{"num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 32, "tie_word_embeddings": True},
    },
}
CODED = ("O1", "O3", "O3-split", "O2-8bit", "O3-split-8bit")
MIXTURE = QWEN3 | {
    "architecture": "mixtral",
    "config": QWEN3["config"] | {"num_local_experts": 4},  # type: ignore[operator]
}


@pytest.mark.parametrize(
    "level", ["O3-split-8bit", *(pytest.param(level, marks=pytest.mark.matrix) for level in ("bf16-amp", "te"))]
)
@pytest.mark.parametrize("model", [QWEN3, MIXTURE], ids=lambda model: str(model["architecture"]))
def test_one_rank_of_a_network_of_transformers(model: dict[str, Any], level: str) -> None:
    """The planner's process finds the parameters, from which the closed form gives what a rank holds."""
    spec = job(model, level)
    sizes = sizes_with(spec, look_at(spec, None).shapes)
    assert states_of(spec, sizes).held == measured(spec)[0]
    assert sizes.num_parameters == sum(parameter.numel() for parameter in build_model(spec.model, 0).parameters())


@pytest.mark.parametrize(
    "level", [*("bf16-amp", "te", "O2"), *(pytest.param(level, marks=pytest.mark.matrix) for level in CODED)]
)
@pytest.mark.parametrize("options", [{"rank": 8}, {"rank": 4, "targets": ["q_proj", "*.mlp.*"], "dtype": "fp32"}])
def test_one_rank_of_a_job_with_adapters(level: str, options: dict[str, Any]) -> None:
    of_network = job(QWEN3, level)
    spec = job({"family": "huggingface", "path": "/models/qwen3"}, level, adapter=options)
    states = states_of(spec, sizes_with(spec, look_at(of_network, None).shapes))
    config, model = resolve(of_network, RankEnv(rank=0, world_size=1)), build_model(of_network.model, 0)
    add_adapters(model, spec.adapter, config.precision, 0, torch.device("cpu"))
    optimizer = build_optimizer(parameter_groups(model, config.optimizer), config.optimizer, config.gradient_clip)
    prepared = prepare(model, optimizer, config.precision)
    attach_adapters(prepared.model)
    model.loss(batch_of("huggingface")).loss.backward()
    assert prepared.optimizer is not None
    prepared.optimizer.step()
    assert states.held == memory_report(prepared.model, prepared.optimizer)
    assert 0 < states.plain <= sum(states.held.values())
    assert (states.plain < sum(states.held.values())) == (level != "bf16-amp"), "nothing is converted there"


@pytest.mark.parametrize(
    "level", ["bf16-amp", "O3-split-8bit", *(pytest.param(level, marks=pytest.mark.matrix) for level in ("te", "O2"))]
)
@pytest.mark.parametrize(("family", "preset"), [("llama", "llama-tiny"), ("swin", "swin-tiny")])
def test_the_catalog_shows_what_a_rank_holds(family: str, preset: str, level: str) -> None:
    (shown,) = (known for entry in model_families() for known in entry.presets if known.name == preset)
    held, _ = measured(job({"family": family, "preset": preset}, level))
    assert shown.bytes_by_level[level] == sum(held.values())


OPTIONS: tuple[dict[str, Any], ...] = (
    {"training": {"ema_decay": 0.9}},
    {"training": {"gradient_release": True, "gradient_clip": None}},
    {"training": {"optimizer": {"name": "lion"}}},
    {"training": {"optimizer": {"name": "muon"}}},
    {"training": {"optimizer": {"name": "muon"}}, "precision": {"level": "O3-split-8bit"}},
    {"training": {"micro_batch_size": 1, "global_batch_size": 5}},
    {"precision": {"level": "O3", "exclude": ["*.mlp.*"], "skip_last_layers": 2}},
    {"precision": {"level": "O2", "convert_heads": True, "recipe": {"scaling": "delayed", "amax_history_length": 4}}},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_change_what_is_held(options: dict[str, Any]) -> None:
    spec = job(LLAMA, **options)
    assert planned(spec).held == measured(spec)[0]


def test_offloaded_states_are_counted_on_the_host() -> None:
    """On a CPU the report counts them with the rest."""
    spec = job(GPT, training={"offload_optimizer": True})
    found, held = planned(spec), measured(spec)[0]
    assert found.host == held["exp_avg"] + held["exp_avg_sq"] + held["scales"] - found.held["scales"] > 0
    assert sum(found.held.values()) + found.host == sum(held.values())


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize(
    "level",
    [pytest.param(level, marks=() if level in ("O3", "bf16-amp") else pytest.mark.matrix) for level in LEVELS if level != "ao"],
)
@pytest.mark.parametrize(("workers", "parallelism"), LAYOUTS, ids=str)
def test_a_rank_of_each_layout(workers: int, parallelism: dict[str, Any], level: str, family: str) -> None:
    model = MODELS[family] | ({"num_key_value_heads": 2} if family == "llama" else {})
    if level == "fp16-amp" and parallelism.keys() & {"tensor", "context"}:
        pytest.skip("a level that scales losses takes no tensor or context degree")
    spec = job(model, level, workers, parallelism=parallelism, training={"micro_batch_size": 1})
    found, (held, sent) = planned(spec), on_fake_ranks(spec)
    assert found.held == held
    for collective, by_dtype in found.sent.items():
        for dtype, num_bytes in by_dtype.items():
            assert num_bytes == pytest.approx(sent[collective][dtype], rel=0.01), (collective, dtype)
    counted = sum(sum(by_dtype.values()) for by_dtype in found.sent.values())
    assert counted == pytest.approx(sum(sum(by_dtype.values()) for by_dtype in sent.values()), rel=0.015)


def counted(rank: int, port: int, folder: str, documents: dict[str, dict[str, Any]], num_ranks: int = 2) -> None:
    """Take a step of each job as one of some real ranks, and write what the rank holds and sends."""
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, init_method=f"tcp://127.0.0.1:{port}")
    found = {name: measured_on_axes(JobSpec.model_validate(document), rank) for name, document in documents.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.system
def test_ranks_gather_the_matrices_of_muon(tmp_path: Path) -> None:
    """A CPU gathers fp32, accelerators bf16. Nothing else differs from what AdamW sends but who has a gradient of a matrix."""
    names, stages = ("muon", "adamw"), (1, 2, 3)
    specs = {
        f"{name} {stage}": job(
            LLAMA,
            "O2",
            2,
            training={"micro_batch_size": 1, "optimizer": {"name": name}},
            parallelism={"zero_stage": stage},
        )
        for name in names
        for stage in stages
    }
    documents = {name: spec.model_dump(mode="json", exclude_unset=True) for name, spec in specs.items()}
    run_ranks(counted, (free_port(), str(tmp_path), documents), 2)
    found = json.loads((tmp_path / "0.json").read_text())
    for stage in stages:
        (held, sent, _), (_, sent_by_adamw, _) = (found[f"{name} {stage}"] for name in names)
        muon, adamw = (planned(specs[f"{name} {stage}"]) for name in names)
        assert muon.held == held
        gathered = {dtype: num_bytes - sent_by_adamw["gather"].get(dtype, 0) for dtype, num_bytes in sent["gather"].items()}
        expected = muon.sent["gather"]["bfloat16"] - adamw.sent["gather"].get("bfloat16", 0)
        assert gathered == dict.fromkeys(gathered, 0) | {"float32": 2 * expected}
        assert expected > 0


def sent_by(rank: int, port: int, folder: str, documents: dict[str, dict[str, Any]]) -> None:
    """Take a step of each job as one of two real ranks, and write what the rank sends on other axes than that of replicas."""
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
    found = {name: measured_on_axes(JobSpec.model_validate(document), rank)[2] for name, document in documents.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


EXCHANGING: dict[str, dict[str, Any]] = {
    f"{family}, {level}, {name}": {
        "model": MODELS[family] | {"num_layers": 4} | ({"num_key_value_heads": 2} if family == "llama" else {}),
        "precision": {"level": level} | ({} if level == "fp32" else {"auto_filter": False, "statistics_every": 0}),
        "parallelism": parallelism,
        "training": {"micro_batch_size": 2, "global_batch_size": 6} | ({} if level == "fp32" else {"residual_stream": "bf16"}),
    }
    for family in ("gpt", "llama")
    for level in ("fp32", "O2")
    for name, parallelism in (
        ("tensor", {"tensor": 2}),
        ("sequence", {"tensor": 2, "sequence": True}),
        ("context", {"context": 2}),
    )
}
"""A CPU's ranks send activations in the dtypes of a GPU's in fp32, and where the residual stream is in bf16.

Steps that sample statistics, which are not traced, also exchange those.
"""


@pytest.mark.system
def test_plans_count_what_tensor_and_context_ranks_send_each_other(tmp_path: Path) -> None:
    specs = {name: job(**case, workers=2) for name, case in EXCHANGING.items()}
    documents = {name: spec.model_dump(mode="json", exclude_unset=True) for name, spec in specs.items()}
    run_ranks(sent_by, (free_port(), str(tmp_path), documents), 2)
    counted_bytes = json.loads((tmp_path / "0.json").read_text())
    replies = list(trace_here([TraceRequest(id=name, job=spec) for name, spec in specs.items()]))
    assert {reply.id: reply.reason for reply in replies if reply.peak is None} == {}
    for reply in replies:
        assert reply.peak is not None
        planned_bytes = {
            f"{axis} {collective} {dtype}": num_bytes
            for axis, by_collective in reply.peak.exchanged.items()
            for collective, by_dtype in by_collective.items()
            for dtype, num_bytes in by_dtype.items()
        }
        found = {key: num_bytes for key, num_bytes in counted_bytes[reply.id].items() if num_bytes}
        assert planned_bytes == pytest.approx(found, rel=0.01), reply.id
        assert sum(planned_bytes.values()) > 0


@pytest.mark.system
def test_ranks_hold_and_send_what_was_planned_of_their_experts(tmp_path: Path) -> None:
    """Four ranks hold each expert twice. Each token goes to all experts, so that the ranks send alike."""
    model = MIXTURE | {"config": MIXTURE["config"] | {"num_experts_per_tok": 4}}
    quiet = {"statistics_every": 0}
    specs = {
        f"{level} {stage}": job(
            model,
            workers=4,
            precision={"level": level, **quiet},
            parallelism={"expert": 2, "zero_stage": stage},
            training={"gradient_clip": None},
        )
        for level, stage in (("O2", 0), ("O2", 1), ("O3-split", 1), ("te", 1))
    }
    documents = {name: spec.model_dump(mode="json", exclude_unset=True) for name, spec in specs.items()}
    run_ranks(counted, (free_port(), str(tmp_path), documents, 4), 4)
    found = json.loads((tmp_path / "0.json").read_text())
    for name, spec in specs.items():
        sizes = sizes_with(spec, look_at(spec, None).shapes)
        held, sent, on_axes = found[name]
        states = states_of(spec, sizes)
        # Scales of the gradients that one op makes for a stack lie 16 bytes apart; those that ranks exchange are each alone.
        apart = 12 * sum(shape.expert is not None for shape in sizes.parameters() or ()) // 2 if name == "O2 0" else 0
        assert states.held | {"scales": states.held["scales"] + apart} == held, name
        for collective, by_dtype in states.sent.items():
            for dtype, num_bytes in by_dtype.items():
                assert num_bytes == pytest.approx(sent[collective][dtype], rel=0.01), (name, collective, dtype)
        exchanged = exchanged_of_experts(spec, sizes)
        assert exchanged is not None
        values = exchanged["expert"]["exchange"].pop("bfloat16")
        exchanged["expert"]["exchange"]["float32"] = 2 * values  # a CPU's activations
        planned_bytes = {
            f"expert {collective} {dtype}": num_bytes
            for collective, by_dtype in exchanged["expert"].items()
            for dtype, num_bytes in by_dtype.items()
        }
        of_experts = {key: num_bytes for key, num_bytes in on_axes.items() if key.startswith("expert") and num_bytes}
        if "expert max float32" in planned_bytes:  # the ranks also agree on skipped steps, and on the norm
            assert of_experts.pop("expert max float32") == pytest.approx(planned_bytes.pop("expert max float32"), abs=8)
        assert planned_bytes == {key: of_experts[key] for key in planned_bytes}, name


def trained(rank: int, port: int, folder: str, document: dict[str, Any]) -> None:
    """Train as one of two real ranks, and write what the rank holds."""
    config = resolve(JobSpec.model_validate(document), RankEnv(rank=rank, world_size=2, master_port=port))
    with Mesh(config.env, torch.device("cpu"), config.layout) as mesh:
        trainer = Trainer(config, mesh, Recorder(), Path(folder, "job"))
        trainer.run(())
        Path(folder, f"{rank}.json").write_text(json.dumps(trainer.progress.memory_bytes))


@pytest.mark.system
@pytest.mark.parametrize(
    "parallelism", [{"pipeline": 2}, {"pipeline": 2, "schedule": "interleaved"}, {"zero_stage": 1}], ids=str
)
def test_real_ranks_of_a_job_hold_what_each_of_them_was_planned(parallelism: dict[str, Any], tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    model = GPT | {"vocab_size": 256, "num_layers": 4 if "schedule" in parallelism else 3}
    spec = job(
        model, "O3", 2, parallelism=parallelism, data={"path": str(corpus)}, training={"micro_batch_size": 1, "eval_batches": 1}
    )
    run_ranks(trained, (free_port(), str(tmp_path), spec.model_dump(mode="json")), 2)
    reported = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(spec.parallelism.pipeline)]
    assert [states_of_rank(spec, spec.model.sizes, rank).held for rank in range(spec.parallelism.pipeline)] == reported
    (row,) = rows_of(candidates(PlanRequest(job=spec, levels=("O3",))), [], [])
    assert [stage.states for stage in row.stages] == (reported if spec.parallelism.pipeline > 1 else [])
    assert row.states in reported
    assert sum((row.states or {}).values()) == max(sum(held.values()) for held in reported), "the largest decides"


def test_what_only_a_rank_knows_is_not_planned() -> None:
    with pytest.raises(NotPlanned, match="family huggingface"):
        planned(job({"family": "huggingface", "architecture": "llama", "config": {"vocab_size": 64}}))


@given(
    level=st.sampled_from([name for name in LEVELS if name != "fp16-amp"]),
    family=st.sampled_from(["gpt", "llama"]),
    stage=st.sampled_from([1, 2, 3]),
    ranks=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_more_ranks_of_zero_never_raise_a_ranks_bytes(level: str, family: str, stage: int, ranks: tuple[int, int]) -> None:
    """At stage 3 padding and one element for each released weight may add what a tiny model saves."""
    fewer, more = sorted(ranks)
    slack = 128 * 4 * 64 if stage == 3 else 0
    found = [
        sum(planned(job(MODELS[family], level, number, parallelism={"zero_stage": stage})).held.values())
        for number in (fewer, more)
    ]
    assert found[1] <= found[0] + slack


def test_level_auto_is_a_level_only_once_the_service_has_chosen_it() -> None:
    document = {
        "name": "auto",
        "model": "gpt-tiny",
        "precision": "auto",
        "data": {"path": "/data"},
        "training": {"steps": 1, "sequence_length": 64},
    }
    job = JobSpec.model_validate(document)
    with pytest.raises(NotPlanned, match="chosen before it starts"):
        states_of(job, job.model.sizes)
    shown = validated(job)
    assert (shown.states, shown.recipe, shown.gradient_accumulation) == (None, None, None)
    with pytest.raises(ValueError, match=r"precision\.level: got auto; allowed: a level"):
        resolve(job, RankEnv())
    with pytest.raises(ValueError, match="recipe at level te"):
        JobSpec.model_validate(document | {"precision": {"level": "auto", "recipe": {}}})

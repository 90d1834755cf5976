"""torchtitan's files become a part of a job."""

import tomllib
from typing import Any

import pytest

from octet.api_schemas import JobSpec
from octet.api_schemas.imports.patch import NOTHING, Given, Patch
from octet.api_schemas.imports.torchtitan import from_torchtitan

# The structure of torchtitan's llama3_8b.toml.
LLAMA = """
[job]
dump_folder = "./outputs"
[metrics]
log_freq = 10
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = ["float8"]
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 2
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 8
[checkpoint]
enable = true
interval = 250
[compile]
enable = true
components = ["model", "loss"]
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
filter_fqns = ["output"]
[validation]
enable = true
freq = 500
steps = 20
"""


def llama(**parts: dict[str, Any] | None) -> dict[str, Any]:
    """Return the file with other settings in some parts."""
    document: dict[str, Any] = tomllib.loads(LLAMA)
    for part, changes in parts.items():
        document[part] = document.get(part, {}) | changes if changes is not None else {}
    return document


def what_matters(patch: Patch) -> list[str]:
    return [f"{left.setting}: {left.reason}" for left in patch.left if left.matters]


def whole(patch: Patch) -> JobSpec:
    model = {"preset": "llama-tiny", "max_sequence_length": 8192}
    return JobSpec.model_validate({"name": "x", "model": model, "data": {"path": "/data"}, **patch.job})


def test_a_file_of_one_axis() -> None:
    patch = from_torchtitan(llama())
    assert what_matters(patch) == []
    assert patch.job["parallelism"] == {"zero_stage": 3}
    assert patch.job["resources"] == {"workers": 8}
    assert patch.job["precision"]["level"] == "ao"
    assert patch.job["precision"]["exclude"] == ["*output*"]
    assert patch.job["training"] == {
        "steps": 1000,
        "sequence_length": 8192,
        "gradient_clip": 1.0,
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "eval_every": 500,
        "eval_batches": 20,
        "optimizer": {
            "name": "adamw",
            "learning_rate": 3e-4,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "betas": [0.9, 0.95],
        },
        "schedule": {"warmup_steps": 200, "name": "linear", "final_fraction": 0.0},
        "checkpoint_every": 250,
        "keep": {"last": 10},
        "activation_checkpointing": "selective",
        "compile": "on",
    }
    assert whole(patch).batch.num_micro_batches == 1
    assert {left.setting for left in patch.left} == {"training.dataset: c4", "model.name: llama3 8B"}


@pytest.mark.parametrize(
    ("parallelism", "degrees", "workers", "batch"),
    [
        ({"tensor_parallel_degree": 2}, {"tensor": 2, "sequence": True, "zero_stage": 3}, 16, (16, 2)),
        ({"context_parallel_degree": 2}, {"context": 2, "zero_stage": 3}, 16, (16, 2)),
        ({"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 4}, {}, 4, (8, 2)),
        ({"fsdp_reshard_after_forward": "never"}, {"zero_stage": 2}, 8, (16, 2)),
        ({"data_parallel_replicate_degree": 2}, {"zero_stage": 3}, 16, (32, 2)),
        (
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B", "data_parallel_shard_degree": 1},
            {"pipeline": 2, "schedule": "interleaved"},
            2,
            (2, 1),
        ),
    ],
)
def test_degrees(parallelism: dict[str, Any], degrees: dict[str, Any], workers: int, batch: tuple[int, int]) -> None:
    patch = from_torchtitan(llama(parallelism=parallelism, model={"converters": []}, compile=None))
    assert patch.job.get("parallelism", {}) == degrees
    assert patch.job["resources"]["workers"] == workers
    training = patch.job["training"]
    assert (training["global_batch_size"], training["micro_batch_size"]) == batch
    assert what_matters(patch) == []
    assert whole(patch).layout.num_ranks == workers


def test_accumulation_and_the_number_of_processes() -> None:
    document = llama(training={"global_batch_size": 64}, parallelism={"data_parallel_shard_degree": -1})
    patch = from_torchtitan(document, Given(workers=8))
    assert whole(patch).batch.num_micro_batches == 4
    assert from_torchtitan(document).job["training"]["global_batch_size"] == 64
    unknown = from_torchtitan(llama(parallelism={"data_parallel_shard_degree": -1}), NOTHING)
    assert "global_batch_size" not in unknown.job["training"]
    assert what_matters(unknown)[0].startswith("training.local_batch_size: 2: the whole batch follows from the number")
    with pytest.raises(ValueError, match=r"training\.global_batch_size is 60; allowed: a multiple of local_batch_size 2 · 8"):
        from_torchtitan(llama(training={"global_batch_size": 60}))


def test_float8_where_ranks_divide_layers_is_te_with_the_same_recipe() -> None:
    quantize = {"linear": {"float8": {"recipe_name": "rowwise", "filter_fqns": ["output", "auto_filter_small_kn"]}}}
    patch = from_torchtitan(llama(parallelism={"tensor_parallel_degree": 2}, quantize=quantize))
    precision = patch.job["precision"]
    assert (precision["level"], precision["recipe"]["granularity"], precision["exclude"]) == ("te", "row", ["*output*"])
    assert what_matters(patch) == []
    assert {left.setting for left in patch.left} >= {"model.converters: float8", "compile.enable: true"}
    assert whole(patch).precision.level == "te"
    mx = from_torchtitan(llama(model={"converters": ["mx"]}))
    assert mx.job["precision"] == {"level": "te", "recipe": {"granularity": "mx"}, "exclude": ["*output*"]}
    assert whole(mx).precision.level == "te"


def test_numbers_of_the_user_take_the_place_of_the_files() -> None:
    training = from_torchtitan(llama(), Given(batch_size=4, steps=300)).job["training"]
    assert (training["global_batch_size"], training["micro_batch_size"], training["steps"]) == (32, 4, 300)
    with pytest.raises(ValueError, match=r"--workers is 4; allowed: 8, the product of the degrees in parallelism"):
        from_torchtitan(llama(), Given(workers=4))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"decay_type": "cosine", "min_lr_factor": 0.1}, {"name": "cosine", "final_fraction": 0.1}),
        ({"decay_ratio": 0.8}, {"name": "warmup_stable_decay", "final_fraction": 0.0, "decay_fraction": 0.8}),
        ({"decay_ratio": 0.0}, {"name": "constant"}),
    ],
)
def test_schedules(schedule: dict[str, Any], expected: dict[str, Any]) -> None:
    patch = from_torchtitan(llama(lr_scheduler=schedule))
    assert patch.job["training"]["schedule"] == {"warmup_steps": 200} | expected
    assert what_matters(patch) == []


@pytest.mark.parametrize(
    ("parts", "left"),
    [
        ({"lr_scheduler": {"decay_type": "sqrt"}}, "lr_scheduler.decay_type: sqrt: jobs go down in a line"),
        ({"parallelism": {"expert_parallel_degree": 2}}, "parallelism.expert_parallel_degree: 2: experts lie on every rank"),
        ({"training": {"enable_cpu_offload": True}}, "training.enable_cpu_offload: true: ranks keep their shards"),
        ({"training": {"dtype": "bfloat16"}}, "training.dtype: bfloat16: what lasts is stored"),
        ({"activation_checkpoint": {"mode": "memory_budget"}}, "activation_checkpoint.mode: memory_budget: jobs compute"),
        ({"activation_checkpoint": {"selective_ac_option": "2"}}, "activation_checkpoint.selective_ac_option: 2"),
        ({"checkpoint": {"initial_load_path": "seed"}}, "checkpoint.initial_load_path: seed: a job starts from"),
        ({"optimizer": {"name": "Muon"}}, "optimizer.name: Muon: jobs have the optimizers"),
        ({"model": {"converters": ["prune"]}}, "model.converters: prune: the linear layers of a job"),
        ({"new_part": {"on": True}}, "new_part: {on}: no setting of torchtitan"),
    ],
)
def test_what_matters_is_left_over_by_name(parts: dict[str, Any], left: str) -> None:
    (line,) = what_matters(from_torchtitan(llama(**parts)))
    assert line.startswith(left)


def test_a_pipeline_shards_states_alone() -> None:
    parts = {"parallelism": {"pipeline_parallel_degree": 2}, "model": {"converters": []}}
    patch = from_torchtitan(llama(**parts))
    assert patch.job["parallelism"] == {"pipeline": 2, "zero_stage": 1, "schedule": "1f1b"}
    assert what_matters(patch)[0].startswith("parallelism.data_parallel_shard_degree: 8: ranks of a pipeline shard")
    assert whole(patch).batch.num_micro_batches == 2

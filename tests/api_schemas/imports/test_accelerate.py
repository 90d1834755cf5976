"""Files that Accelerate itself writes become a part of a job: sharding, batch, clipping, compilation, offload, precision."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from octet.api_schemas import JobSpec
from octet.api_schemas.imports.accelerate import from_accelerate
from octet.api_schemas.imports.patch import NOTHING, Given, Patch

FSDP2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_activation_checkpointing": True,
}
ZERO2 = {
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "zero3_init_flag": False,
}
MEGATRON = {
    "megatron_lm_tp_degree": 2,
    "megatron_lm_pp_degree": 2,
    "megatron_lm_sequence_parallelism": True,
    "megatron_lm_num_micro_batches": 4,
    "megatron_lm_recompute_activations": True,
    "megatron_lm_use_distributed_optimizer": True,
    "megatron_lm_gradient_clipping": 1.0,
}


def written(folder: Path, kind: str, mixed_precision: str = "bf16", num_processes: int = 8, **sections: Any) -> dict[str, Any]:
    """Return a configuration as Accelerate's own class writes it, which `accelerate config` and the tests of Accelerate use."""
    from accelerate.commands.config.config_args import ClusterConfig

    machine = {"compute_environment": "LOCAL_MACHINE", "use_cpu": False, "debug": False, "num_processes": num_processes}
    config = ClusterConfig(distributed_type=kind, mixed_precision=mixed_precision, **machine, **sections)
    config.to_yaml_file(str(folder / "config.yaml"))
    document: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
    return document


def what_matters(patch: Patch) -> list[str]:
    return [f"{left.setting}: {left.reason}" for left in patch.left if left.matters]


def whole(patch: Patch, **parts: Any) -> JobSpec:
    """Return the job that a part of one completes."""
    llama = {"preset": "llama-tiny"}
    base: dict[str, Any] = {"name": "x", "model": llama, "data": {"path": "/data"}, **patch.job, **parts}
    base["training"] = {"steps": 10, **base.get("training", {})}
    return JobSpec.model_validate(base)


def test_what_write_basic_config_writes(tmp_path: Path) -> None:
    from accelerate.utils import write_basic_config

    write_basic_config("bf16", str(tmp_path / "config.json"))
    patch = from_accelerate(yaml.safe_load((tmp_path / "config.json").read_text()))
    assert patch.job == {"resources": {"workers": 1}, "precision": {"level": "bf16-amp"}}
    assert patch.left == []


def test_fsdp2_is_zero_stage_3_with_its_batch(tmp_path: Path) -> None:
    document = written(tmp_path, "FSDP", fsdp_config=FSDP2, dynamo_config={"dynamo_backend": "INDUCTOR"})
    patch = from_accelerate(document, Given(batch_size=2))
    assert patch.job == {
        "resources": {"workers": 8},
        "precision": {"level": "bf16-amp"},
        "parallelism": {"zero_stage": 3},
        "training": {
            "activation_checkpointing": "full",
            "compile": "on",
            "global_batch_size": 16,
            "micro_batch_size": 2,
        },
    }
    assert what_matters(patch) == []
    (left,) = patch.left
    assert left.setting == "fsdp_config: fsdp_auto_wrap_policy, fsdp_cpu_ram_efficient_loading, fsdp_state_dict_type"
    assert whole(patch).batch.num_micro_batches == 1


@pytest.mark.parametrize(
    ("config", "stage"),
    [
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, 2),
        ({"fsdp_version": 2, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": False}, 2),
        ({"fsdp_version": 2}, 3),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, 2),
        ({"fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, 2),
        ({"fsdp_sharding_strategy": 3}, 0),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, 3),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, 2),
        ({}, 3),
    ],
)
def test_each_strategy_is_a_stage(tmp_path: Path, config: dict[str, Any], stage: int) -> None:
    patch = from_accelerate(written(tmp_path, "FSDP", fsdp_config=config))
    assert patch.job["parallelism"] == {"zero_stage": stage}
    assert what_matters(patch) == []
    assert any("across nodes" in left.reason for left in patch.left) == ("HYBRID" in str(config))


def test_zero_2_keeps_its_accumulation_and_clipping(tmp_path: Path) -> None:
    fp8 = {"backend": "MSAMP", "optimization_level": "O2"}
    document = written(tmp_path, "DEEPSPEED", "fp8", 4, deepspeed_config=ZERO2, fp8_config=fp8)
    patch = from_accelerate(document, Given(batch_size=2))
    assert patch.job["parallelism"] == {"zero_stage": 2}
    assert patch.job["training"] == {"gradient_clip": 0.5, "global_batch_size": 32, "micro_batch_size": 2}
    assert patch.job["precision"]["level"] == "O2"
    assert patch.left == []
    assert whole(patch).batch.num_micro_batches == 4


def test_a_batch_is_never_guessed(tmp_path: Path) -> None:
    patch = from_accelerate(written(tmp_path, "DEEPSPEED", deepspeed_config=ZERO2))
    assert "global_batch_size" not in patch.job["training"]
    assert what_matters(patch) == [
        "gradient_accumulation_steps: 4: the batch of a process is not in this file: give --batch-size"
    ]
    unknown = from_accelerate(written(tmp_path, "DEEPSPEED", num_processes=-1, deepspeed_config=ZERO2), Given(batch_size=2))
    assert "resources" not in unknown.job
    assert [line.partition(":")[0] for line in what_matters(unknown)] == ["num_processes", "the batch of a process"]
    assert from_accelerate(written(tmp_path, "MULTI_GPU")).job == {
        "resources": {"workers": 8},
        "precision": {"level": "bf16-amp"},
    }


def test_megatrons_degrees_are_a_jobs(tmp_path: Path) -> None:
    patch = from_accelerate(written(tmp_path, "MEGATRON_LM", megatron_lm_config=MEGATRON), Given(batch_size=2))
    assert patch.job["parallelism"] == {"tensor": 2, "pipeline": 2, "sequence": True, "zero_stage": 1}
    assert patch.job["training"] == {
        "activation_checkpointing": "selective",
        "gradient_clip": 1.0,
        "global_batch_size": 16,
        "micro_batch_size": 2,
    }
    assert patch.left == []
    assert whole(patch).batch.num_micro_batches == 4


def test_a_mesh_has_its_degrees(tmp_path: Path) -> None:
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2, "cp_size": 1}
    mesh = {f"parallelism_config_{key}": size for key, size in sizes.items()}
    patch = from_accelerate(written(tmp_path, "FSDP", fsdp_config=FSDP2, parallelism_config=mesh), Given(batch_size=1))
    assert patch.job["parallelism"] == {"tensor": 2, "zero_stage": 3}
    assert patch.job["training"]["global_batch_size"] == 4
    assert what_matters(patch) == []
    assert whole(patch).layout.data == 4


def test_offload_is_set_where_one_rank_trains_and_left_over_elsewhere(tmp_path: Path) -> None:
    offload = ZERO2 | {"offload_optimizer_device": "cpu", "gradient_accumulation_steps": 1}
    alone = from_accelerate(written(tmp_path, "DEEPSPEED", num_processes=1, deepspeed_config=offload))
    assert alone.job["training"]["offload_optimizer"] is True
    assert alone.job["parallelism"] == {"zero_stage": 0}
    assert what_matters(alone) == []
    assert whole(alone).training.offload_optimizer
    together = from_accelerate(written(tmp_path, "DEEPSPEED", deepspeed_config=offload))
    assert "offload_optimizer" not in together.job["training"]
    assert what_matters(together)[0].startswith("deepspeed_config.offload_optimizer_device: cpu: ranks keep their shards")
    params = from_accelerate(written(tmp_path, "FSDP", fsdp_config={"fsdp_version": 2, "fsdp_offload_params": True}))
    assert what_matters(params)[0].startswith("fsdp_config.fsdp_offload_params: true: ranks keep their shards on the device")


@pytest.mark.parametrize(
    ("kind", "sections", "left"),
    [
        ("DEEPSPEED", {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}, "`octet import deepspeed`"),
        ("FSDP", {"fsdp_config": {"fsdp_new_thing": 3}}, "fsdp_config.fsdp_new_thing: 3: no setting of Accelerate's FSDP"),
        ("XLA", {}, "distributed_type: XLA: jobs run on GPUs and CPUs"),
        ("MEGATRON_LM", {"megatron_lm_config": {"megatron_lm_expert_model_parallel_size": 2}}, "expert_model_parallel_size: 2"),
    ],
)
def test_what_matters_is_left_over_by_name(tmp_path: Path, kind: str, sections: dict[str, Any], left: str) -> None:
    (line,) = what_matters(from_accelerate(written(tmp_path, kind, **sections)))
    assert left in line


def test_what_accelerate_would_not_take_is_refused(tmp_path: Path) -> None:
    document = written(tmp_path, "FSDP", fsdp_config={"fsdp_sharding_strategy": "HALF_SHARD"})
    with pytest.raises(ValueError, match=r"fsdp_config\.fsdp_sharding_strategy is 'half_shard'; allowed: FULL_SHARD"):
        from_accelerate(document)
    with pytest.raises(ValueError, match="unknown key 'num_procs' in an Accelerate configuration"):
        from_accelerate({"num_procs": 2, "mixed_precision": "no"})
    with pytest.raises(ValueError, match="gradient_accumulation_steps is 'four'; allowed: a whole number from 1 up"):
        from_accelerate(written(tmp_path, "DEEPSPEED", deepspeed_config=ZERO2 | {"gradient_accumulation_steps": "four"}))


def test_a_block_alone_is_a_precision() -> None:
    patch = from_accelerate({"backend": "AO", "enable_fsdp_float8_all_gather": True}, NOTHING)
    assert patch.job.keys() == {"precision"}
    assert patch.job["precision"]["level"] == "ao"
    (left,) = patch.left
    assert not left.matters
    assert "wide_communication" in left.reason

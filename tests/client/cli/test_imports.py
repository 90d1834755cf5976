"""`octet import`: it writes a job or a part of one, says what is left over, and ends with 3 if that matters."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from octet.client.cli import build_app
from octet.client.job_file import check_spec

ZERO2 = {
    "distributed_type": "DEEPSPEED",
    "num_processes": 4,
    "mixed_precision": "bf16",
    "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 4},
}


def octet_import(kind: str, document: Any, *options: str, folder: Path) -> Result:
    file = folder / ("file.toml" if isinstance(document, str) else "file.yaml")
    file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return CliRunner().invoke(build_app(), ["import", kind, str(file), *options])


def test_each_option_has_an_effect_on_a_part_too(tmp_path: Path) -> None:
    options = ["--name", "mine", "--model", "gpt-tiny", "--steps", "7", "--workers", "2", "--batch-size", "1"]
    found = octet_import("accelerate", ZERO2, *options, folder=tmp_path)
    part = yaml.safe_load(found.stdout)
    assert (part["name"], part["model"], part["resources"]) == ("mine", {"preset": "gpt-tiny"}, {"workers": 2})
    assert part["training"] == {"global_batch_size": 8, "micro_batch_size": 1, "steps": 7}


def test_without_data_it_is_a_part_of_a_job(tmp_path: Path) -> None:
    found = octet_import("accelerate", ZERO2, "--batch-size", "2", folder=tmp_path)
    assert found.exit_code == 0, found.output
    assert yaml.safe_load(found.stdout) == {
        "resources": {"workers": 4},
        "precision": {"level": "bf16-amp"},
        "parallelism": {"zero_stage": 2},
        "training": {"global_batch_size": 32, "micro_batch_size": 2},
    }
    assert found.stderr == ""


def test_what_matters_ends_with_3_and_the_rest_is_written(tmp_path: Path) -> None:
    found = octet_import("accelerate", ZERO2, folder=tmp_path)
    assert found.exit_code == 3
    assert yaml.safe_load(found.stdout)["parallelism"] == {"zero_stage": 2}
    assert found.stderr.startswith("left over: gradient_accumulation_steps: 4: the batch of a process is not in this file")


def test_with_data_it_is_a_whole_job_in_a_file(tmp_path: Path) -> None:
    options = ["--data", "/data/text", "--model", "gpt-tiny", "--steps", "50", "--batch-size", "2", "-o", str(tmp_path / "job")]
    found = octet_import("accelerate", ZERO2, *options, folder=tmp_path)
    assert found.exit_code == 0, found.output
    spec = check_spec(yaml.safe_load((tmp_path / "job").read_text()), "job")
    assert (spec.name, spec.training.steps, spec.batch.num_micro_batches) == ("from-accelerate", 50, 4)


def test_a_whole_job_without_a_batch_says_so(tmp_path: Path) -> None:
    options = ["--data", "/data/text", "--model", "/models/llama", "--steps", "50"]
    found = octet_import("accelerate", ZERO2 | {"distributed_type": "NO"}, *options, folder=tmp_path)
    assert found.exit_code == 3
    assert yaml.safe_load(found.stdout)["model"] == {"path": "/models/llama"}
    assert "left over: training.global_batch_size: not set: the job takes the default, 16 samples a step" in found.stderr


def test_model_and_steps_are_not_guessed(tmp_path: Path) -> None:
    found = octet_import("accelerate", ZERO2, "--data", "/data/text", folder=tmp_path)
    assert found.exit_code == 2
    assert "model" in found.stderr
    assert "Set training. Such as: training: {steps: 200}" in found.stderr


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        (ZERO2 | {"num_procs": 4}, "unknown key 'num_procs'"),
        (ZERO2 | {"deepspeed_config": {"zero_stage": 7}}, "parallelism.zero_stage"),
        (ZERO2 | {"deepspeed_config": {"gradient_clipping": "much"}}, "training.gradient_clip"),
    ],
)
def test_a_wrong_file_is_refused_by_the_field(tmp_path: Path, document: Any, complaint: str) -> None:
    found = octet_import("accelerate", document, folder=tmp_path)
    assert found.exit_code == 2
    assert complaint in found.stderr
    assert "Traceback" not in found.stderr


def test_json_and_standard_input_are_read(tmp_path: Path) -> None:
    given = json.dumps(ZERO2 | {"distributed_type": "NO"})
    found = CliRunner().invoke(build_app(), ["import", "accelerate", "-"], input=given)
    assert found.exit_code == 0, found.output
    missing = CliRunner().invoke(build_app(), ["import", "accelerate", str(tmp_path / "none.yaml")])
    assert missing.exit_code == 2
    assert "cannot read" in missing.stderr


MSAMP = {"train_batch_size": 16, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
ARGUMENTS = {"per_device_train_batch_size": 2, "max_steps": 20, "fsdp": "full_shard"}
AXOLOTL = {"micro_batch_size": 2, "max_steps": 20, "learning_rate": "2e-5", "sequence_len": 128}
TORCHTITAN = """
[training]
local_batch_size = 2
steps = 300
seq_len = 128
[parallelism]
data_parallel_shard_degree = 4
[activation_checkpoint]
mode = "full"
"""


@pytest.mark.parametrize(
    ("kind", "document", "batch"),
    [
        ("deepspeed", MSAMP, 16),
        ("transformers", ARGUMENTS, 8),
        ("axolotl", AXOLOTL, 8),
        ("torchtitan", TORCHTITAN, 8),
    ],
)
def test_each_kind_of_file_is_a_job(tmp_path: Path, kind: str, document: Any, batch: int) -> None:
    options = ["--data", "/data/text", "--model", "llama-tiny", "--workers", "4"]
    options += ["--steps", "300"] if kind == "deepspeed" else []
    found = octet_import(kind, document, *options, folder=tmp_path)
    assert found.exit_code == 0, found.output
    spec = check_spec(yaml.safe_load(found.stdout), kind)
    assert (spec.name, spec.resources.workers, spec.training.global_batch_size) == (f"from-{kind}", 4, batch)


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    found = octet_import("torchtitan", "[training\n", folder=tmp_path)
    assert found.exit_code == 2
    assert "is no TOML" in found.stderr

"""Wrong jobs as people type them, each with a phrase that the answer must contain, and the tables behind the answers."""

from collections import Counter
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from octet.api_schemas import JobSpec, Violation, explain
from octet.api_schemas.intents import ALIASES, INTENTS

GOOD: dict[str, Any] = {
    "name": "first",
    "model": {"preset": "gpt-tiny"},
    "data": {"path": "/data/corpus"},
    "training": {"steps": 20, "sequence_length": 64},
}

WRONG = [
    # A level, and the words of other tools for it.
    ("precision: fp8", "precision.level", "O2: O1 with an FP8 first"),
    ("precision: {level: float8}", "precision.level", "levels, which differ in what they store"),
    ("precision: bf16", "precision.level", "Did you mean 'bf16-amp'?"),
    ("precision: fp16", "precision.level", "Did you mean 'fp16-amp'?"),
    ("precision: 02", "precision.level", "the letter O and a digit"),
    ("precision: 8", "precision.level", "FP8 is a choice of levels"),
    ("precision: {level: full}", "precision.level", "Did you mean 'fp32'?"),
    ("precision: {level: torchao}", "precision.level", "Did you mean 'ao'?"),
    ("precision: {level: transformer-engine}", "precision.level", "Did you mean 'te'?"),
    ("precision: {level: nvfp4}", "precision.level", "No level computes in that format"),
    ("precision: {dtype: fp8}", "precision.dtype", "O3: O2 with FP8 weights"),
    ("opt_level: O2", "opt_level", "Set precision.level: O2."),
    ("level: O2", "level", "Set precision.level: O2."),
    ("mixed_precision: bf16", "mixed_precision", "Did you mean 'bf16-amp'? Change precision.level."),
    ("bf16: true", "bf16", "Set precision.level: bf16-amp."),
    ("fp16: true", "fp16", "Set precision.level: fp16-amp."),
    ("amp: true", "amp", "Set precision.level: bf16-amp or fp16-amp."),
    # A model, a folder, a hub.
    ("model: gpt2", "model.preset", "model: {architecture: …"),
    ("model: meta-llama/Llama-3-8B", "model.preset", "hubs are not reached"),
    ("model: /models/saved", "model.preset", "model: {path: /absolute/folder}"),
    ("model: gpt-tinny", "model.preset", "Did you mean 'gpt-tiny'?"),
    ("model: {name: gpt-tiny}", "model.name", "Set model.preset: gpt-tiny."),
    ("model: {type: llama}", "model.type", "Set model.family: llama."),
    ("model: {path: meta-llama/Llama-3-8B}", "model.path", "hubs are not reached"),
    ("model: {path: runs/saved/last}", "model.path", "the absolute path"),
    ("model: {preset: gpt-tiny, n_layer: 3}", "model.n_layer", "Set model.num_layers: 3."),
    ("model: {preset: gpt-tiny, num_key_value_heads: 2}", "model.num_key_value_heads", "'model.family: llama'"),
    ("model_name_or_path: /models/saved", "model_name_or_path", "Set model.path: /models/saved."),
    # Data.
    ("data: corpus", "data", "--data-root"),
    ("data: /data/corpus", "data", "Write data: {path: /data/corpus}"),
    ("data: {path: wikitext/wikitext-103}", "data.path", "hubs are not reached"),
    ("data: {path: ~/corpus}", "data.path", "~ is not expanded"),
    ("data: {path: ./corpus}", "data.path", "A relative path has no meaning to a worker"),
    ("data: {source: jsonl, path: /d, tokenizer: org/name}", "data.tokenizer", "hubs are not reached"),
    ("data: {source: hf, path: /d}", "data.source", "Did you mean 'datasets'"),
    ("data: {path: /d, text_column: body}", "data.text_column", "'data.source: datasets'"),
    ("dataset: /data/corpus", "dataset", "Set data.path: /data/corpus."),
    # Batches, lengths, the optimizer.
    ("batch_size: 32", "batch_size", "Which is meant? training.global_batch_size"),
    ("training: {steps: 20, batch_size: 32}", "training.batch_size", "training.micro_batch_size: samples of one rank"),
    ("training: {steps: 20, batchSize: 32}", "training.batchSize", "Set one of them to 32."),
    ("per_device_train_batch_size: 4", "per_device_train_batch_size", "Set training.micro_batch_size: 4."),
    ("gradient_accumulation_steps: 4", "gradient_accumulation_steps", "training.global_batch_size / ("),
    ("training: 100", "training", "Write training: {steps: 100}"),
    ("steps: 100", "steps", "Set training.steps: 100."),
    ("max_steps: 100", "max_steps", "Set training.steps: 100."),
    ("epochs: 3", "epochs", "Set training.epochs: 3."),
    ("num_epochs: 3", "num_epochs", "Set training.epochs: 3."),
    ("training: {steps: 20, seq_len: 64}", "training.seq_len", "Set training.sequence_length: 64."),
    ("lr: 0.001", "lr", "Set training.optimizer.learning_rate: 0.001."),
    ("learning_rate: 0.001", "learning_rate", "Set training.optimizer.learning_rate: 0.001."),
    ("training: {steps: 20, learning_rate: 0.1}", "training.learning_rate", "training.optimizer.learning_rate: 0.1."),
    ("weight_decay: 0.1", "weight_decay", "training.optimizer.weight_decay: 0.1."),
    ("training: {steps: 20, optimizer: adamw}", "training.optimizer", "Write training.optimizer: {name: adamw}"),
    ("training: {steps: 20, optimizer: {name: adamw_8bit}}", "training.optimizer.name", "precision.level: O2-8bit"),
    ("training: {steps: 20, optimizer: {beta1: 0.9}}", "training.optimizer.beta1", "training.optimizer.betas: [0.9, 0.95]"),
    ("training: {steps: 20, schedule: cosine}", "training.schedule", "Write training.schedule: {name: cosine}"),
    ("training: {steps: 20, schedule: {name: wsd}}", "training.schedule.name", "Did you mean 'warmup_stable_decay'?"),
    ("warmup_steps: 10", "warmup_steps", "training.schedule.warmup_steps: 10."),
    ("warmup_ratio: 0.1", "warmup_ratio", "Set training.schedule.warmup_steps, a number"),
    ("max_grad_norm: 1.0", "max_grad_norm", "Set training.gradient_clip: 1.0."),
    ("training: {steps: 20, gradient_clip: 0}", "training.gradient_clip", "set training.gradient_clip: null"),
    ("training: {steps: 20, compile: true}", "training.compile", "Did you mean 'on'?"),
    ("gradient_checkpointing: true", "gradient_checkpointing", "Set training.activation_checkpointing: full"),
    ("seed: 7", "seed", "training.seed: 7."),
    # Ranks and the rest.
    ("gpus: 8", "gpus", "Set resources.workers: 8."),
    ("resources: 8", "resources", "Write resources: {workers: 8}"),
    ("resources: {num_gpus: 8}", "resources.num_gpus", "resources.pool names the pool"),
    ("resources: {pool: H100 cluster}", "resources.pool", "small letters, digits and '-'"),
    ("device: cuda", "device", "set resources.pool"),
    ("deepspeed: ds_config.json", "deepspeed", "Set parallelism.zero_stage: 1, 2 or 3"),
    ("fsdp: full_shard", "fsdp", "Set parallelism.zero_stage: 3"),
    ("zero_stage: 2", "zero_stage", "parallelism.zero_stage: 2."),
    ("tensor_parallel_size: 2", "tensor_parallel_size", "Set parallelism.tensor: 2."),
    ("lora: true", "lora", "Set adapter: {rank: 16}"),
    ("adapter: lora", "adapter", "Write adapter: {rank: …}"),
    ("retries: 3", "retries", "Set retry.max_failures: 3."),
    ("wandb: true", "wandb", "Set trackers: {tensorboard: {}}; mlflow and wandb"),
    ("log_every: 10", "log_every", "octet metrics"),
    ("output_dir: out", "output_dir", "octet download"),
    ("script: train.py", "script", "model.entrypoint"),
    ("name: my first job", "name", "letters, digits, '.', '_' and '-'"),
    ("trainning: {}", "trainning", "Did you mean 'training'?"),
    # Levels and recipes once more: words of other projects, lists and nothing in place of a name.
    ("precision: o2", "precision.level", "Did you mean 'O2'?"),
    ("precision: fp8-hybrid", "precision.level", "FP8 is a choice of levels"),
    ("precision: delayed", "precision.level", "FP8 is a choice of levels"),
    ("precision: {fp8: true}", "precision.fp8", "FP8 is a choice of levels"),
    ("fp8: true", "fp8", "FP8 is a choice of levels"),
    ("use_fp8: true", "use_fp8", "Change precision.level"),
    ("quantization: fp8", "quantization", "Change precision.level"),
    ("precision: null", "precision", "name a level: precision: O2"),
    ("precision: {recipe: tensorwise}", "precision.recipe", "Write precision.recipe: {granularity: tensor}."),
    ("precision: {level: O2, recipe: delayed}", "precision.recipe", "Write precision.recipe: {scaling: delayed}."),
    ("precision: {level: O2, margin: 0}", "precision.margin", "Set precision.recipe.margin: 0."),
    ("precision: {level: O2, amax_history: 16}", "precision.amax_history", "precision.recipe.amax_history_length: 16."),
    ("precision: {level: O2, exclude: lm_head}", "precision.exclude", 'Write precision.exclude: ["lm_head"].'),
    ("precision: {level: O2, skip: [lm_head]}", "precision.skip", "Set precision.exclude"),
    # Models and data.
    ("model: gpt", "model.preset", "Its smallest preset is 'gpt-tiny'."),
    ("model: llama", "model.preset", "Its smallest preset is 'llama-tiny'."),
    ("model: bert", "model.preset", "Did you mean 'roberta-tiny'?"),
    ("MODEL: gpt-tiny", "MODEL", "Did you mean 'model'? Set model: gpt-tiny."),
    ("hf_model_id: /models/x", "hf_model_id", "Set model.path: /models/x."),
    ("architecture: gpt2", "architecture", "Set model.architecture: gpt2."),
    ("vocab_size: 256", "vocab_size", "Set model.vocab_size: 256."),
    ("task: classification", "task", "follow from model.family"),
    ("loss: mse", "loss", "follow from model.family"),
    ("data: s3://bucket/corpus", "data", "Write data: {path: s3://bucket/corpus}."),
    ("data: null", "data", "Write data: {path: …}."),
    ("data: {path: /d, glob: '*.txt'}", "data.glob", 'Set data.include: ["*.txt"], a list of globs.'),
    ("data: {path: /d, include: '*.txt'}", "data.include", 'Write data.include: ["*.txt"].'),
    ("data: {path: /d, include: []}", "data.include", "a list of at least 1"),
    ("data: {path: /d, split: train}", "data.split", "data.evaluation_fraction"),
    ("dataloader: {num_workers: 4}", "dataloader", "reads ahead by itself"),
    # Training.
    ("training: null", "training", "Write training: {steps: …}."),
    ("training: {steps: 20, eval_every: null}", "training.eval_every", "Set training.eval_every: 0"),
    ("training: {step: 100}", "training.step", "Did you mean 'steps'?"),
    ("training: {steps: 1.5}", "training.steps", "an integer"),
    ("training: {Steps: 100}", "training.Steps", "Did you mean 'steps'? Set training.steps: 100."),
    ("training: {steps: 20, grad_clip: 1}", "training.grad_clip", "Set training.gradient_clip: 1."),
    ("training: {steps: 20, bf16: true}", "training.bf16", "Set precision.level: bf16-amp."),
    ("training: {steps: 20, precision: O2}", "training.precision", "Set precision: O2."),
    ("training: {steps: 20, optimizer: {lr: 0.1}}", "training.optimizer.lr", "Set training.optimizer.learning_rate: 0.1."),
    ("training: {steps: 20, optimizer: {name: adam_w}}", "training.optimizer.name", "Did you mean 'adamw'?"),
    ("optimizer: adamw", "optimizer", "Set training.optimizer: adamw."),
    ("scheduler: cosine", "scheduler", "Set training.schedule.name: cosine."),
    ("learningRate: 0.1", "learningRate", "Set training.optimizer.learning_rate: 0.1."),
    ("eval: true", "eval", "Set training.eval_every"),
    ("checkpointing: true", "checkpointing", "Set training.checkpoint_every"),
    ("save_every: 10", "save_every", "Set training.checkpoint_every: 10."),
    ("compile: true", "compile", "Did you mean 'on'? Change training.compile."),
    ("train: {steps: 5}", "train", "Did you mean 'training'?"),
    # Ranks and the rest.
    ("workers: 2", "workers", "Set resources.workers: 2."),
    ("resources: {gpus: 2}", "resources.gpus", "Set resources.workers: 2."),
    ("parallelism: {data: 2}", "parallelism.data", "The data parallel degree follows"),
    ("dp: 2", "dp", "The data parallel degree follows"),
    ("priority: high", "priority", "Set priority: 75"),
    ("retry: 3", "retry", "Write retry: {max_failures: 3}."),
    ("retry: {max: 3}", "retry.max", "Set retry.max_failures: 3."),
    ("labels: [a, b]", "labels", "Write labels: {team: research}."),
    ("env: {A: b}", "env", "the environment of the workers"),
    ("project: chat", "project", "labels: {team: chat}"),
    ("kind: Job", "kind", "fields stand at the top"),
    ("spec: {}", "spec", "fields stand at the top"),
    ("hours: 3", "hours", "no time limit"),
    ("name: 5", "name", 'Write name: "5", with the quotes.'),
    ("Name: x", "Name", "Did you mean 'name'?"),
]


def violations_of(change: str) -> tuple[Violation, ...]:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(GOOD | yaml.safe_load(change))
    return explain(caught.value, JobSpec)


def test_the_table_has_at_least_110_wrong_jobs() -> None:
    assert len(dict(map(lambda row: (row[0], row), WRONG))) >= 110


@pytest.mark.parametrize(("change", "field", "phrase"), WRONG, ids=[row[0] for row in WRONG])
def test_a_wrong_job_gets_an_answer_that_names_what_is_meant(change: str, field: str, phrase: str) -> None:
    (violation,) = violations_of(change)
    assert violation.field == field
    assert phrase in f"{violation.allowed} {violation.message}"


@pytest.mark.parametrize("change", ["colour: red", "zzz: 1", "training: {steps: 20, colour: red}"])
def test_a_name_that_nothing_is_like_gets_no_guess(change: str) -> None:
    (violation,) = violations_of(change)
    assert "Did you mean" not in violation.message


def test_a_part_that_is_missing_is_shown_by_an_example() -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate({})
    shown = {violation.field: violation.message for violation in explain(caught.value, JobSpec)}
    assert shown["model"] == "Set model. Such as: model: gpt-tiny"
    assert set(shown) == {"name", "model", "data", "training"}


@pytest.mark.parametrize(("bare", "part"), [("O2", "level"), ("bf16-amp", "level")])
def test_a_bare_level_is_its_name(bare: str, part: str) -> None:
    assert JobSpec.model_validate(GOOD | {"precision": bare}) == JobSpec.model_validate(GOOD | {"precision": {part: bare}})


@pytest.mark.parametrize("preset", ["gpt-tiny", "llama-tiny"])
def test_a_bare_model_is_its_preset(preset: str) -> None:
    spec = JobSpec.model_validate(GOOD | {"model": preset})
    assert spec == JobSpec.model_validate(GOOD | {"model": {"preset": preset}})
    assert spec.model_dump(mode="json")["model"]["preset"] == preset


def test_every_alias_leads_to_a_field_and_no_name_has_two_meanings() -> None:
    for path in ALIASES:
        change: dict[str, Any] = {}
        *parents, field = path.split(".")
        holder = change
        for parent in parents:
            holder = holder.setdefault(parent, {})
        holder[field] = object()  # a value that no field takes
        with pytest.raises(ValidationError) as caught:
            JobSpec.model_validate(change)
        unknown = [detail["loc"] for detail in caught.value.errors() if detail["type"] == "extra_forbidden"]
        assert unknown == [], path
    names = [name for row in ALIASES.values() for name in row.split()]
    names += [name for row, _ in INTENTS.values() for name in row.split()]
    assert [name for name, count in Counter(names).items() if count > 1] == []

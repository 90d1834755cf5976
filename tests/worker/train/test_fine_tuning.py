"""A model is trained, exported, fine-tuned on conversations at a level, exported, and loaded by transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from octet.api_schemas import JobSpec, StartedReport
from octet.worker.common.config import RankEnv, resolve
from octet.worker.common.errors import Cancelled, InvalidConfig
from octet.worker.data import open_source
from octet.worker.data.tokens import write_shards
from octet.worker.fp8.linear import Float8Linear
from octet.worker.pretrained.__main__ import main as export
from octet.worker.pretrained.start import read_model, start_model
from tests.kit.chat import VOCAB_SIZE, save_tokenizer, write_chats
from tests.kit.text import text
from tests.kit.training import Recorder, train, with_training

LLAMA = {
    "family": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_sequence_length": 64,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama that was trained on the carried text, and its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = save_tokenizer(folder / "tokenizer")
    tokens = tokenizer(text(400))["input_ids"]
    write_shards(folder / "shards", VOCAB_SIZE, [tokens[:-2000]], [tokens[-2000:]])
    document = {
        "name": "base",
        "model": LLAMA,
        "precision": {"level": "O2"},
        "data": {"source": "tokens", "path": str(folder / "shards")},
        "training": {"steps": 40, "global_batch_size": 8, "sequence_length": 32, "optimizer": {"learning_rate": 1e-2}},
    }
    recorder, summary = train(document, folder / "job")
    assert summary.evaluation_loss < 0.8 * recorder.losses()[0]
    export_checkpoint(recorder, folder / "job", folder / "model")
    save_tokenizer(folder / "model")
    return folder / "model"


@pytest.fixture
def document(base: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "name": "fine-tuned",
        "model": {"path": str(base)},
        "precision": {"level": "O2", "recipe": {"fp8_in_evaluation": False}},
        "data": {"source": "jsonl", "path": str(write_chats(tmp_path / "chats.jsonl"))},
        "training": {"epochs": 3, "global_batch_size": 8, "sequence_length": 48, "optimizer": {"learning_rate": 5e-3}},
    }


def export_checkpoint(recorder: Recorder, job_dir: Path, folder: Path) -> None:
    checkpoint = job_dir / "checkpoints" / recorder.checkpoints()[0].name
    assert export([str(checkpoint), "--format", "fp32", "--out", str(folder)]) == 0


def completion_loss(folder: Path, spec: JobSpec) -> float:
    """The loss of transformers' model on the completions of the records that are held out, token by token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = open_source(spec.data.with_model(spec.model.files), spec.training.sequence_length, seed=0)
    lines = Path(spec.data.path).read_text().splitlines()
    losses: list[float] = []
    for number in source.evaluation:
        messages = json.loads(lines[number])["messages"]
        tokens = tokenizer.apply_chat_template(messages, return_dict=False)[:49]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
        answers = []  # by the template: an answer begins behind <|assistant|> and ends with <|end|>
        inside = False
        for token in tokens:
            answers.append(inside)
            if token == tokenizer.convert_tokens_to_ids("<|assistant|>"):
                inside = True
            elif token == tokenizer.eos_token_id:
                inside = False
        kept = [at for at, is_answer in enumerate(answers) if is_answer]
        targets = torch.tensor([tokens[at] for at in kept])
        losses += functional.cross_entropy(logits[[at - 1 for at in kept]], targets, reduction="none").tolist()
    return sum(losses) / len(losses)


@pytest.mark.system
def test_a_model_is_fine_tuned_on_conversations(base: Path, tmp_path: Path, document: dict[str, Any]) -> None:
    recorder, summary = train(document, tmp_path / "job")
    spec = JobSpec.model_validate(document)
    export_checkpoint(recorder, tmp_path / "job", tmp_path / "tuned")
    assert summary.steps == recorder.of(StartedReport)[0].steps == 14  # 3 epochs of 36 records, 8 a step
    before, after = completion_loss(base, spec), completion_loss(tmp_path / "tuned", spec)
    assert after < 0.3 * before
    assert summary.evaluation_loss == pytest.approx(after, rel=0.05)  # evaluation computes in bf16
    assert summary.evaluation_metrics["token_accuracy"] > 0.5


@pytest.mark.matrix
def test_a_fine_tuned_model_is_exported_in_fp8(tmp_path: Path, document: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    recorder, _ = train(with_training(document, "O3", steps=2, epochs=None), tmp_path / "job")
    checkpoint = str(tmp_path / "job" / "checkpoints" / recorder.checkpoints()[0].name)
    logits = []
    for format in ("fp8", "fp32"):
        assert export([checkpoint, "--format", format, "--out", str(tmp_path / format)]) == 0
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / format, dtype=torch.float32, output_loading_info=True)
        assert not any(info.values()), info
        with torch.no_grad():
            logits.append(model(torch.arange(32)[None]).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=0.1 * float(logits[1].abs().max()))


@pytest.mark.matrix  # tests/e2e compares micro-batches of two ranks with those of one
def test_it_resumes_bit_identically_and_micro_batches_weigh_as_their_targets(tmp_path: Path, document: dict[str, Any]) -> None:
    document = with_training(document, steps=6, epochs=None, checkpoint_every=2)
    whole, summary = train(document, tmp_path / "whole")
    interrupted = Recorder(stop_after_step=4)
    with pytest.raises(Cancelled):
        train(document, tmp_path / "parts", recorder=interrupted)
    resumed, again = train(document, tmp_path / "parts", interrupted.checkpoints())
    assert resumed.losses() == whole.losses()[2:]
    assert again.evaluation_loss == summary.evaluation_loss
    small, _ = train(with_training(document, micro_batch_size=2), tmp_path / "small")
    assert small.losses() == pytest.approx(whole.losses(), rel=1e-4)


@pytest.mark.system
@pytest.mark.parametrize("level", ["O3-split", pytest.param("fp32", marks=pytest.mark.matrix)])
def test_weights_are_read_as_the_level_converts_them(base: Path, document: dict[str, Any], level: str) -> None:
    """No weight is in memory twice: converted layers are made from the file one by one."""
    from octet.worker.prepare.convert import convert
    from octet.worker.prepare.options import read_options

    config = resolve(JobSpec.model_validate(with_training(document, level)), RankEnv())
    model, weights = start_model(config.model, 0, config.readable_files)
    assert weights is not None
    assert all(parameter.is_meta for parameter in model.parameters())
    read: list[str] = []
    original = weights.files.read
    weights.files.read = lambda name, *rest: (read.append(name), original(name, *rest))[1]  # type: ignore[method-assign]
    conversion = convert(model, read_options(level, {}), source=weights)
    weights.finish(conversion.model, None)
    plain = read_model(config.model)
    assert len(read) == len(set(read)) == len(list(plain.parameters()))
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        layer = model.get_submodule(name.rpartition(".")[0])
        is_coded = isinstance(layer, Float8Linear) and layer.encoded is not None
        values = layer.weight_values() if is_coded else parameter
        torch.testing.assert_close(values.float(), expected, rtol=0.07 if is_coded else 0, atol=1e-3 if is_coded else 0)


def test_a_changed_start_of_a_folder_is_a_thousandth_away(base: Path, document: dict[str, Any]) -> None:
    config = resolve(JobSpec.model_validate(with_training(document, "O3-split", start_change=1e-3)), RankEnv())
    model, source = start_model(config.model, 3, config.readable_files, start_change=config.training.start_change)
    assert source is None
    for values, expected in zip(model.parameters(), read_model(config.model).parameters(), strict=True):
        change = (values / expected - 1).detach()[expected != 0]
        assert change.square().mean().sqrt() == pytest.approx(1e-3, rel=0.5)


def test_a_folder_that_changed_its_names_is_read_by_transformers(base: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    spec = JobSpec.model_validate(
        {
            "name": "x",
            "model": {"path": str(tmp_path)},
            "data": {"source": "jsonl", "path": "/x"},
            "training": {"steps": 1},
        }
    ).model
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    weights = load_file(base / "model.safetensors")
    save_file(weights | {"a_stranger": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidConfig, match=r"has unknown 1 weights .*a_stranger"):
        start_model(spec, 0)
    without_prefix = {name.removeprefix("model."): weight for name, weight in weights.items() if "lm_head" not in name}
    save_file(without_prefix, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidConfig, match=r"lacks 1 weights .*lm_head"):
        start_model(spec, 0)

"""Tasks of lm-eval on what a job exports: its own reader of stock transformers finds the same scores."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from octet.api_schemas import EvaluationReport, EventReport, ExportReport, Files
from octet.api_schemas.data.stores import NO_STORES
from octet.worker.common.errors import InvalidConfig
from octet.worker.data.tokens import write_shards
from tests.kit.chat import VOCAB_SIZE, save_tokenizer
from tests.kit.tasks import write_tasks
from tests.kit.text import text
from tests.kit.training import Recorder, train
from tests.worker.train.test_job_export import LLAMA, QWEN3

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore")]  # lm-eval's own, and what it imports

TASKS = ["capitals", "texts", "words"]


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "data"
    tokens = save_tokenizer(folder / "tokenizer")(text(300))["input_ids"]
    write_shards(folder / "shards", VOCAB_SIZE, [tokens[:-1000]], [tokens[-1000:]])
    training = {"steps": 4, "global_batch_size": 4, "sequence_length": 32, "eval_every": 2, "checkpoint_every": 2}
    return {
        "name": "evaluated",
        "model": LLAMA,
        "precision": {"level": "O3"},
        "data": {"source": "tokens", "path": str(folder / "shards")},
        "training": training | {"eval_batches": 2, "optimizer": {"learning_rate": 1e-2}},
        "export": {"format": "fp8", "compared_tokens": 64},
        "evaluation": {
            "tasks": TASKS,
            "path": str(write_tasks(tmp_path / "tasks")),
            "tokenizer": str(folder / "tokenizer"),
        },
    }


def scored(recorder: Recorder) -> list[EvaluationReport]:
    return [report for report in recorder.of(EvaluationReport) if "capitals_acc" in report.metrics]


def their_scores(export: Path, document: dict[str, Any]) -> dict[str, Any]:
    """The results of lm-eval with its own reader of transformers' models."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(document["evaluation"]["tokenizer"])
    folder = Path(document["evaluation"]["path"])
    tasks = []
    for name in TASKS:
        config = load_yaml(folder / f"{name}.yaml")
        config["dataset_kwargs"]["data_files"] = {"test": str(folder / "capitals.jsonl")}
        tasks.append(config)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, max_length=64, batch_size=1, device="cpu")
    found = simple_evaluate(theirs, tasks=tasks, log_samples=False, task_manager=TaskManager(include_defaults=False))
    assert found is not None
    return found["results"]


@pytest.mark.parametrize(("model", "format"), [(LLAMA, "fp8"), (QWEN3, "fp8"), (LLAMA, "bf16")], ids=str)
def test_scores_are_those_of_lm_evals_own_reader(
    document: dict[str, Any], model: dict[str, Any], format: str, tmp_path: Path
) -> None:
    document |= {"model": model, "export": document["export"] | {"format": format}}
    recorder, summary = train(document, tmp_path / "job")
    [evaluated], [export] = scored(recorder), recorder.of(ExportReport)
    found, theirs = evaluated.metrics, their_scores(tmp_path / "job" / "exports" / export.name, document)
    for metric in ("acc", "acc_norm"):
        value, error = theirs["capitals"][f"{metric},none"], theirs["capitals"][f"{metric}_stderr,none"]
        assert error > 0, "a score with no spread shows nothing"
        assert found[f"capitals_{metric}"] == pytest.approx(value)
        assert found[f"capitals_{metric}_half_width"] == pytest.approx(1.959964 * error)
    assert found["texts_bits_per_byte"] == pytest.approx(theirs["texts"]["bits_per_byte,none"], rel=1e-5)
    assert found["words_exact_match"] == theirs["words"]["exact_match,none"]
    assert summary.evaluation_metrics["capitals_acc"] == found["capitals_acc"]
    assert (evaluated.step, evaluated.loss) == (4, summary.evaluation_loss)
    assert found["token_accuracy"] == summary.evaluation_metrics["token_accuracy"]
    [event] = [event for event in recorder.of(EventReport) if event.type == "job.evaluated"]
    assert f"capitals_acc {found['capitals_acc']:.4g} ± " in event.message
    assert "| evaluation: capitals_acc |" in (tmp_path / "job" / "exports" / export.name / "README.md").read_text()


def test_exports_of_chosen_steps_are_evaluated_and_training_does_not_change(document: dict[str, Any], tmp_path: Path) -> None:
    document["training"] |= {"steps": 5, "eval_every": 1, "checkpoint_every": 1}
    document["export"] |= {"when": "every_checkpoint", "compared_tokens": 0}
    document["evaluation"] |= {"every": 2, "tasks": ["capitals"], "limit": 3}
    recorder, _ = train(document, tmp_path / "with")
    assert [report.step for report in recorder.of(ExportReport)] == [1, 2, 3, 4, 5]
    assert [report.step for report in scored(recorder)] == [2, 4, 5]
    assert len({report.metrics["capitals_acc"] * 3 % 1 for report in scored(recorder)}) == 1, "thirds: three samples"
    without, _ = train(document | {"evaluation": None, "export": None}, tmp_path / "without")
    assert recorder.losses() == without.losses()


def test_a_resumed_attempt_reports_the_scores_of_an_export_that_is_there(document: dict[str, Any], tmp_path: Path) -> None:
    document["evaluation"]["tasks"] = ["capitals"]
    first, summary = train(document, tmp_path / "job")
    [yaml_file] = [path for path in (tmp_path / "tasks").glob("capitals.yaml")]
    assert yaml.safe_load(yaml_file.read_text())["task"] == "capitals"
    second, again = train(document, tmp_path / "job", first.checkpoints())
    assert (scored(second), second.losses()) == (scored(first), [])
    assert again.evaluation_metrics == summary.evaluation_metrics


def test_byte_texts_need_no_tokenizer(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(text(400))
    document["data"] = {"source": "text", "path": str(tmp_path / "corpus.txt")}
    document["evaluation"] = {"path": document["evaluation"]["path"], "tasks": TASKS}
    recorder, _ = train(document, tmp_path / "job")
    [evaluated] = scored(recorder)
    assert 2 < evaluated.metrics["texts_bits_per_byte"] < 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dataset_path: org/capitals", "dataset_path 'org/capitals'; allowed: json, csv, parquet, text"),
        ("data_files: {test: gone.jsonl}", "gone.jsonl"),
        ("data_files: {test: ../outside.jsonl}", "a file or folder inside"),
        ("doc_to_text: '{{ no_such_field }}'\ntest_split: validation", "validation"),
    ],
    ids=["hub", "missing", "outside", "split"],
)
def test_a_wrong_task_is_refused_before_the_first_step(
    document: dict[str, Any], change: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "tasks" / "capitals.yaml"
    (tmp_path / "outside.jsonl").write_text("{}\n")
    key = change.partition(":")[0]
    lines = [change if line.strip().startswith(key) else line for line in path.read_text().splitlines()]
    path.write_text("\n".join(f"  {line}" if line.startswith("data_files") else line for line in lines))
    files = Files.below((tmp_path / "data", tmp_path / "tasks"), NO_STORES)
    recorder = Recorder()
    with pytest.raises(InvalidConfig, match="evaluation: ") as refused:
        train(document, tmp_path / "job", recorder=recorder, files=files)
    assert message in str(refused.value)
    assert recorder.losses() == []

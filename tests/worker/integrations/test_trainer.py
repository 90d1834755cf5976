"""transformers' Trainer at a precision level: it learns, it is saved plainly, and it continues bit for bit."""

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import HfArgumentParser, LlamaForCausalLM, Trainer, TrainingArguments

from octet import OctetArguments, initialize, plain_state_dict, prepare_trainer
from octet.api_schemas.levels import LEVELS
from tests.worker.integrations.bits import assert_same_bits
from tests.worker.integrations.tiny import evaluated_loss, examples, llama

MARKS = {"O3": (), "te": pytest.mark.system}
"""Codes and wide weights are in every run; fp32 is what both are compared with, and O2 is below."""
ALL = [pytest.param(level, marks=MARKS.get(level, pytest.mark.matrix)) for level in LEVELS]
CLOSE = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 5e-3, "fp8": 0.03}
"""Relative distance of a loss from fp32's after a step, by the dtype of the products."""
STEPS = 4


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Trainer prints its logs as it trains; nobody reads them here."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(verbosity)


def training_arguments(folder: Path, **options: Any) -> TrainingArguments:
    usual = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 1}
    usual |= {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "log_level": "error"}
    return TrainingArguments(output_dir=str(folder), **(usual | options))


def trainer(folder: Path, level: str | None, seed: int = 0, dropout: float = 0.0, **options: Any) -> Trainer:
    """level: None leaves the trainer as it is."""
    arguments = training_arguments(folder, **options)
    made = Trainer(llama(seed, dropout), arguments, train_dataset=examples(64), eval_dataset=examples(8, seed=1))
    if level is not None:
        prepare_trainer(made, OctetArguments(octet_level=level))
    return made


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


OPTIONS: dict[str, Any] = {
    "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "label_smoothing_factor": 0.1,
    "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def fp32_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of Trainer without Octet."""
    plain = trainer(tmp_path_factory.mktemp("plain"), None, dropout=0.1, **OPTIONS)
    plain.train()
    return losses(plain)


@pytest.mark.parametrize("level", ALL)
def test_it_learns_and_resumes_bit_for_bit(level: str, tmp_path: Path, fp32_losses: list[float]) -> None:
    """Under accumulation, clipping, label smoothing, dropout, evaluation and a limit of checkpoints."""
    whole = trainer(tmp_path, level, dropout=0.1, **OPTIONS)
    whole.train()
    assert fp32_losses[-1] < 0.98 * fp32_losses[0]
    assert losses(whole) == pytest.approx(fp32_losses, rel=CLOSE[LEVELS[level].gemm])
    assert {folder.name for folder in tmp_path.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}
    assert_is_plain(tmp_path / "checkpoint-4", whole.model)

    resumed = trainer(tmp_path / "again", level, seed=1, dropout=0.1, **OPTIONS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(resumed) == losses(whole)
    [*_, evaluated] = [entry["eval_loss"] for entry in whole.state.log_history if "eval_loss" in entry]
    assert evaluated in [entry.get("eval_loss") for entry in resumed.state.log_history[-3:]]
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())
    assert_same_bits(resumed.optimizer.state_dict(), whole.optimizer.state_dict())


def assert_is_plain(folder: Path, trained: nn.Module) -> None:
    """The folder holds a model that transformers loads, with the trained values."""
    loaded, report = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    expected = plain_state_dict(trained)
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())
    rows = examples(8, seed=1)
    assert evaluated_loss(trained, rows) == pytest.approx(evaluated_loss(loaded, rows), rel=2e-3)


@pytest.mark.system
@pytest.mark.parametrize("level", ["O3", pytest.param("te", marks=pytest.mark.matrix)])
def test_what_initialize_made_can_be_given_to_it(level: str, tmp_path: Path) -> None:
    def make(folder: Path, seed: int) -> Trainer:
        model = llama(seed)
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), level)
        arguments = training_arguments(folder, max_steps=2, save_strategy="steps", save_steps=1)
        made = Trainer(model, arguments, train_dataset=examples(64), optimizers=(optimizer, None))
        prepare_trainer(made)
        return made

    whole = make(tmp_path, 0)
    whole.train()
    resumed = make(tmp_path / "again", 1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert losses(whole)[-1] < losses(whole)[0]
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param("O2", "O3-split", marks=pytest.mark.system)]
    + [
        pytest.param(*pair, marks=pytest.mark.matrix)
        for pair in ((None, "O3"), ("te", "O3"), ("O3", "te"), ("fp16-amp", "O2"), ("O1", "fp16-amp"))
    ],
)
def test_a_run_continues_at_another_level(source: str | None, target: str, tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(tmp_path, source, **options)
    whole.train()
    other = trainer(tmp_path / "other", target, seed=1, **options)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(other)[:2] == losses(whole)[:2]
    assert losses(other)[2:] == pytest.approx(losses(whole)[2:], rel=CLOSE["fp8"])


@pytest.mark.system
def test_the_best_checkpoint_comes_back(tmp_path: Path) -> None:
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}  # the first
    made = trainer(tmp_path, "O2", **options, **best)
    made.train()
    first, last = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert last < first - 0.01
    assert made.evaluate()["eval_loss"] == pytest.approx(first, rel=1e-5)


@pytest.mark.system
def test_a_checkpoint_without_the_models_state_is_refused(tmp_path: Path) -> None:
    model = llama()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), "O2")
    arguments = training_arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    Trainer(model, arguments, train_dataset=examples(64), optimizers=(optimizer, None)).train()
    resumed = trainer(tmp_path, "O2", max_steps=2)
    with pytest.raises(ValueError, match="no octet_model_state; allowed: checkpoints of a run that called"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": ({"fp16": True}, r"fp16 is True at level O2; allowed: False"),
    "fp16_full_eval": ({"fp16_full_eval": True}, "fp16_full_eval is True"),
    "bf16_full_eval": ({"bf16_full_eval": True}, "bf16_full_eval is True"),
    "optim": ({"optim": "sgd"}, "cannot hold the states of SGD"),
}
OF_OTHERS: dict[str, tuple[str, Any, str]] = {
    "deepspeed": ("is_deepspeed_enabled", True, "deepspeed is True at level O2; allowed: None"),
    "fsdp": ("is_fsdp_enabled", True, "fsdp is True at level O2; allowed: none"),
    "peft": ("model.peft_config", {"default": "lora"}, "peft_config is .* Checkpoints of adapters leave out"),
    "model_init": ("model_init", llama, "Each training would start from a plain model. Pass model"),
    "two GPUs": ("args._n_gpu", 2, "n_gpu is 2 at level O2; allowed: 1. Run one process per device"),
    "parallelism": ("args.parallelism_config", "tp=2", "parallelism_config is 'tp=2' at level O2; allowed: None"),
}
"""Attributes that DeepSpeed, PEFT, a launcher and GPUs give to a trainer. The test sets them by hand, without these."""


@pytest.mark.parametrize("option", REFUSED)
def test_an_argument_that_does_not_go_with_a_level_is_refused_by_name(option: str, tmp_path: Path) -> None:
    options, message = REFUSED[option]
    made = trainer(tmp_path, None, **options)
    before = [type(module) for module in made.model.modules()]
    with pytest.raises(ValueError, match=message):
        prepare_trainer(made, OctetArguments())
    assert [type(module) for module in made.model.modules()] == before
    assert made.optimizer is None


@pytest.mark.parametrize("what", OF_OTHERS)
def test_what_others_do_to_a_trainer_is_refused_by_name(what: str, tmp_path: Path) -> None:
    attribute, value, message = OF_OTHERS[what]
    made = trainer(tmp_path, None)
    before = [type(module) for module in made.model.modules()]
    owner, _, name = attribute.rpartition(".")
    setattr(attrgetter(owner)(made) if owner else made, name, value)
    with pytest.raises(ValueError, match=message):
        prepare_trainer(made, OctetArguments())
    assert [type(module) for module in made.model.modules()] == before
    assert made.optimizer is None


@pytest.mark.system
@pytest.mark.parametrize(("level", "is_refused"), [("fp32", True), ("fp16-amp", True), ("O2", False)])
def test_autocast_goes_with_levels_of_bf16(level: str, is_refused: bool, tmp_path: Path) -> None:
    made = trainer(tmp_path, None, bf16=True, max_steps=2)
    if is_refused:
        with pytest.raises(ValueError, match=f"bf16 is True at level {level}; allowed: False"):
            prepare_trainer(made, OctetArguments(octet_level=level))
        return
    prepare_trainer(made, OctetArguments(octet_level=level))
    made.train()
    assert losses(made)[1] < losses(made)[0]


def test_the_command_line(tmp_path: Path) -> None:
    parser = HfArgumentParser((OctetArguments, TrainingArguments))
    line = [
        "--output_dir",
        str(tmp_path),
        "--octet_level",
        "O3-split",
        "--octet_exclude",
        "*.mlp.*, *.o_proj",
        "--octet_strict",
    ]
    octet, training = parser.parse_args_into_dataclasses([*line, "--use_cpu", "--max_steps", "1"])
    assert octet.spec().model_dump(include={"level", "exclude", "strict"}) == {
        "level": "O3-split",
        "exclude": ("*.mlp.*", "*.o_proj"),
        "strict": True,
    }
    assert training.max_steps == 1
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--octet_level", "O4"])


def test_an_initialized_model_needs_its_optimizer(tmp_path: Path) -> None:
    model, _ = initialize(llama(), opt_level="O2")
    made = Trainer(model, training_arguments(tmp_path), train_dataset=examples(4))
    with pytest.raises(ValueError, match=r"Pass optimizers=\(optimizer, None\)"):
        prepare_trainer(made)
    with pytest.raises(ValueError, match="got OctetArguments for a model that is initialized"):
        prepare_trainer(made, OctetArguments())
    with pytest.raises(ValueError, match="got no OctetArguments"):
        prepare_trainer(Trainer(nn.Module(), training_arguments(tmp_path)))

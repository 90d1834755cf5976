"""TRL's SFTTrainer and DPOTrainer at a precision level: they learn, and continue bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octet import OctetArguments, prepare_trainer
from tests.worker.integrations.bits import assert_same_bits
from tests.worker.integrations.tiny import examples, llama

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own warnings


OPTIONS: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 1, "save_steps": 2,
    "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True,
}  # fmt: skip


def tokenizer() -> Any:
    """Each character of ASCII is a token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    words.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=chr(0), pad_token=chr(1))


def sft(folder: Path, seed: int) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in examples(32)])
    arguments = SFTConfig(output_dir=str(folder), **OPTIONS)
    return SFTTrainer(llama(seed), arguments, train_dataset=rows, processing_class=tokenizer())


def dpo(folder: Path, seed: int) -> Any:
    """The reference model stays as it is."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pair = {"chosen": "a good answer", "rejected": "bad words"}
    rows = Dataset.from_list([{"prompt": f"question {number}", **pair} for number in range(16)])
    arguments = DPOConfig(output_dir=str(folder), max_length=32, gradient_checkpointing=False, **OPTIONS)
    return DPOTrainer(llama(seed), llama(5), args=arguments, train_dataset=rows, processing_class=tokenizer())


def trainer(make: Callable[[Path, int], Any], folder: Path, level: str, seed: int = 0) -> Any:
    made = make(folder, seed)
    prepare_trainer(made, OctetArguments(octet_level=level))
    return made


def cases() -> list[Any]:
    levels = ("fp32", "bf16-amp", "te", "O1", "O3", "O3-split", "O2-8bit")
    in_matrix = [(dpo, "O2"), *((make, level) for make in (sft, dpo) for level in levels)]
    return [(sft, "O2"), *(pytest.param(*case, marks=pytest.mark.matrix) for case in in_matrix)]


@pytest.mark.system
@pytest.mark.parametrize(("make", "level"), cases())
def test_it_trains_and_resumes_bit_for_bit(make: Callable[[Path, int], Any], level: str, tmp_path: Path) -> None:
    whole = trainer(make, tmp_path, level)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < 0.99 * losses[0]
    resumed = trainer(make, tmp_path / "again", level, seed=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())
    assert_same_bits(resumed.optimizer.state_dict(), whole.optimizer.state_dict())

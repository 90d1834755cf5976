"""TRL's SFTTrainer at a precision level: it learns, and it continues bit for bit."""

from pathlib import Path
from typing import Any

import pytest

from octet import OctetArguments, prepare_trainer
from tests.worker.integrations.bits import assert_same_bits
from tests.worker.integrations.tiny import examples, llama

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own warnings


def trainer(folder: Path, level: str, seed: int = 0) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=chr(0), pad_token=chr(1))
    options: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 1}
    options |= {"save_steps": 2, "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}
    arguments = SFTConfig(output_dir=str(folder), **options)
    rows = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in examples(32)])
    made = SFTTrainer(llama(seed), arguments, train_dataset=rows, processing_class=tokenizer)
    prepare_trainer(made, OctetArguments(octet_level=level))
    return made


@pytest.mark.parametrize("level", ["O2", *(pytest.param(level, marks=pytest.mark.matrix) for level in ("fp32", "te", "O3"))])
def test_it_trains_and_resumes_bit_for_bit(level: str, tmp_path: Path) -> None:
    whole = trainer(tmp_path, level)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < 0.99 * losses[0]
    resumed = trainer(tmp_path / "again", level, seed=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())
    assert_same_bits(resumed.optimizer.state_dict(), whole.optimizer.state_dict())

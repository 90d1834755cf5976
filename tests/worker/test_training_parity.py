"""Every level learns text as well as fp32: 150 steps from the same start on the same batches.

benchmarks/accuracy.py is the version with a thousand steps and curves.
"""

import math

import pytest

from api_schemas import GPTSizes, TextSpec
from api_schemas.levels import LEVELS
from benchmarks.accuracy import DEFAULT_LIMIT, LIMITS, Run, Setting, gap, train_curve
from tests.text import write_corpus
from worker.data.text import open_source
from worker.data.windows import TokenWindows

SIZES = GPTSizes(hidden_size=64, num_layers=2, num_heads=4, vocab_size=256, max_sequence_length=64)
SETTING = Setting(SIZES, batch_size=8, steps=150, warmup_steps=20, learning_rate=3e-3)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TokenWindows:
    corpus = write_corpus(tmp_path_factory.mktemp("parity") / "corpus")
    return open_source(TextSpec(path=str(corpus)), SIZES.max_sequence_length, seed=0)


@pytest.fixture(scope="module")
def reference(text: TokenWindows) -> Run:
    return train_curve("fp32", SETTING, text)


def test_the_reference_learns(reference: Run, text: TokenWindows) -> None:
    assert reference.losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert reference.final_loss < 0.85 * text.facts["unigram_entropy_nats"]


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "fp32"])
def test_the_final_loss_equals_that_of_fp32(level: str, reference: Run, text: TokenWindows) -> None:
    run = train_curve(level, SETTING, text)
    assert abs(gap(run, reference)) <= LIMITS.get(level, DEFAULT_LIMIT), (run.final_loss, reference.final_loss)
    assert run.losses != reference.losses

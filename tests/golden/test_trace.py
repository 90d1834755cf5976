"""The reading list of docs/architecture.md names files that a default job on an accelerator passes through."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import JobSpec
from octet.worker.common.config import RankEnv, resolve
from octet.worker.mesh import Mesh
from octet.worker.train.loop import Trainer
from tests.golden.roads import on_road
from tests.golden.runs import Run, document
from tests.kit.text import write_corpus
from tests.kit.training import Recorder

DOCS = Path(__file__).parents[2] / "docs"
FIRST_TRACED = "worker/train/loop.py"
"""The files before it in the list run in other processes, or before the training loop."""
NUM_DOMINANT = {"worker/fp8/": 2, "worker/kernels/": 2}
"""For each folder, the number of its most called files that the documents have to name."""


@contextmanager
def counting(calls: Counter[str]) -> Iterator[None]:
    """Count the calls of functions of the worker inside, by file."""

    def count(frame: Any, event: str, _argument: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("octet.worker."):
            calls[module.removeprefix("octet.").replace(".", "/") + ".py"] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Counter[str], Counter[str]]:
    """Return the calls of a default job's start, and those of its second step."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("trace")
    job = document(Run("O2", "accelerator", 1), write_corpus(folder / "corpus"))
    config = resolve(JobSpec.model_validate(job), RankEnv())
    start: Counter[str] = Counter()
    step: Counter[str] = Counter()
    with on_road("accelerator"), Mesh(config.env, torch.device("cpu")) as mesh:
        with counting(start):
            trainer = Trainer(config, mesh, Recorder(), folder / "job")
        trainer.step()  # the first step is sampled
        with counting(step):
            trainer.step()
        trainer.batches.close()
    return start, step


def reading_list() -> list[str]:
    """Return the worker's files in "Ten files, in order", from the training loop on."""
    text = (DOCS / "architecture.md").read_text()
    section = text[text.index("\n## Ten files, in order") :]
    section = section[: section.index("\n## ", 1)]
    files = re.findall(r"`(worker/[a-z_0-9/]+\.py)`", section)
    return files[files.index(FIRST_TRACED) :]


def test_the_reading_list_is_on_the_trace(calls: tuple[Counter[str], Counter[str]]) -> None:
    start, step = calls
    assert [file for file in reading_list() if file not in start + step] == []


def test_the_files_that_dominate_a_step_are_named(calls: tuple[Counter[str], Counter[str]]) -> None:
    """By the reading list, or by docs/numerics.md, which follows one operand."""
    _, step = calls
    numerics = (DOCS / "numerics.md").read_text()
    for folder, num_files in NUM_DOMINANT.items():
        files = Counter({file: count for file, count in step.items() if file.startswith(folder)})
        for file, count in files.most_common(num_files):
            is_named = file in reading_list() or f"`{file}`" in numerics or f"`{Path(file).name}`" in numerics
            assert is_named, f"{file} is called {count} times in a step; name it in docs/architecture.md or docs/numerics.md"

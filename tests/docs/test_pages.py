"""The users' pages show blocks that work: Python runs in order, and jobs pass the checks."""

from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
import yaml

from octet.client.job_file import check_spec
from tests.docs.blocks import DOCUMENTS, blocks
from tests.kit.pretrained_models import their_llama

EXECUTED = ("docs/own-loop.md", "docs/coming-from.md")


@pytest.mark.system
@pytest.mark.parametrize("document", EXECUTED)
def test_the_python_blocks_of_a_page_run_in_order(document: str, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(0)
    batch = torch.randn(32, 64)
    their_llama().save_pretrained(tmp_path / "llama")  # type: ignore[operator]  # of transformers
    names: dict[str, Any] = {"batches": [(batch, batch)] * 3, "checkpoint": tmp_path / "model.pt"}
    names |= {"folder": tmp_path / "llama", "run": tmp_path / "run"}
    for block in blocks(document, "python"):
        exec(compile(block, document, "exec"), names)
    assert names["model"].octet_report.converted


def jobs() -> list[tuple[str, dict[str, Any]]]:
    """Return the jobs that documents show: YAML blocks with a name and training."""
    shown = [(document, yaml.safe_load(block)) for document in DOCUMENTS for block in blocks(document, "yaml")]
    return [(document, job) for document, job in shown if isinstance(job, dict) and {"name", "training"} <= job.keys()]


@pytest.mark.parametrize(("document", "job"), jobs(), ids=lambda value: value if isinstance(value, str) else value["name"])
def test_a_job_that_is_shown_passes_the_checks(document: str, job: dict[str, Any]) -> None:
    check_spec(job, document)


def test_some_jobs_are_shown() -> None:
    assert len(jobs()) >= 5


def test_every_python_block_is_python() -> None:
    """A block may be a part of a function, as the tutorial's are."""
    for document in DOCUMENTS:
        for block in blocks(document, "python"):
            compile(f"def part():\n{indent(dedent(block), '    ')}", document, "exec")

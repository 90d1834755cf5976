"""A rank opens only files below the roots, wherever links lead by then: they may have been moved since the submission."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from octet.api_schemas import Files, JobSpec, TextSpec
from octet.api_schemas.data.tokens import TokensSpec
from octet.worker.common.config import RankEnv
from octet.worker.common.errors import DataError
from octet.worker.data import open_source
from octet.worker.data.tokens import write_shards
from octet.worker.metrics.table import Metrics
from octet.worker.rank.main import Run, _train
from octet.worker.reporting.reporter import LogReporter
from tests.kit.text import text

TOKENS = list(text(400).encode())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The one folder that jobs may read. `secret`, next to it, holds the same as `open` in it."""
    for folder in (tmp_path / "root" / "open", tmp_path / "secret"):
        write_shards(folder, 256, [TOKENS[:20_000]], [TOKENS[20_000:]])
        for name in ("a.txt", "b.txt"):
            (folder / name).write_bytes(bytes(TOKENS))
    return tmp_path / "root"


@pytest.mark.parametrize("source", [TokensSpec, TextSpec])
def test_a_link_that_leads_elsewhere_than_at_submission_is_refused(root: Path, source: Any) -> None:
    link, files = root / "link", Files.below((root,))
    link.symlink_to(root / "open")
    spec = source(path=str(link))
    open_source(spec, 32, 0, files)
    link.unlink()
    link.symlink_to(root.parent / "secret")
    with pytest.raises(DataError, match=r"data\.path"):
        open_source(spec, 32, 0, files)
    open_source(spec, 32, 0)  # a rank without a service has no roots


def test_a_single_file_and_a_shard_are_checked_too(root: Path) -> None:
    files = Files.below((root,))
    for name in ("open/a.txt", "open/train-00000.bin"):
        (root / name).unlink()
        (root / name).symlink_to(root.parent / "secret" / Path(name).name)
    for spec in (TextSpec(path=str(root / "open/a.txt")), TokensSpec(path=str(root / "open"))):
        with pytest.raises(DataError, match="inside"):
            open_source(spec, 32, 0, files)


def test_a_folder_that_moves_between_its_listing_and_the_opening_of_a_file(root: Path) -> None:
    @dataclass(frozen=True)
    class Moving(Files):
        def list_below(self, folder: Path, enters: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
            listed = list(super().list_below(folder, enters))
            (root / "open").rename(root / "away")
            (root / "open").symlink_to(root.parent / "secret")
            yield from listed

    with pytest.raises(DataError, match="inside"):
        open_source(TextSpec(path=str(root / "open")), 32, 0, Moving((str(root.resolve()),)))


def test_a_root_may_be_a_link_itself(root: Path) -> None:
    (root.parent / "named").symlink_to(root)
    open_source(TextSpec(path=str(root.parent / "named" / "open")), 32, 0, Files.below((root.parent / "named",)))


def test_the_roots_of_an_order_reach_the_training(root: Path, tmp_path: Path, spec_document: dict[str, Any]) -> None:
    spec = JobSpec.model_validate(spec_document | {"data": {"path": str(root.parent / "secret")}})
    run = Run(LogReporter(), Metrics(), tmp_path / "job", files=Files.below((root,)))
    outcome = _train(spec, RankEnv(), run)
    assert outcome.finished is not None
    assert outcome.finished.outcome == "failed"
    assert str(root) in outcome.message

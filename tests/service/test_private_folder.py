"""The data folder is ours alone, or the server does not start."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from octet.service.processes.startup import private_folder


@pytest.fixture(autouse=True)
def umask_0() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_and_what_is_written_later_are_private(tmp_path: Path) -> None:
    private_folder(tmp_path / "a" / "data")
    (tmp_path / "a" / "data" / "file").write_text("")
    assert [mode(path) for path in (tmp_path / "a" / "data", tmp_path / "a" / "data" / "file")] == [0o700, 0o600]


def test_a_folder_that_others_could_read_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    (folder / "octet.db").write_text("")
    private_folder(folder)
    assert [mode(folder), mode(folder / "octet.db")] == [0o700, 0o600]


@pytest.mark.parametrize("writable", [0o775, 0o757, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, writable: int) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=writable)
    with pytest.raises(ValueError, match=rf"mode {writable:04o}.*chmod go-w"):
        private_folder(folder)
    assert mode(folder) == writable, "it is left for the operator to look at"


@pytest.mark.skipif(os.geteuid() != 0, reason="missing: root, to give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(ValueError, match=r"belongs to user 12345, .* Choose another with --data-dir"):
        private_folder(folder)

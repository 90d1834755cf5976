"""Links that a rank lays in its job's folder lead the server to nothing."""

import os
from pathlib import Path

import pytest

from octet.service.jobs.job_folders import delete_folder, open_file, opened_folder


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    """The folder of a job with a checkpoint of one file, next to another tenant's."""
    for job in ("ours", "theirs"):
        folder = tmp_path / job / "checkpoints/step_1"
        folder.mkdir(parents=True)
        (folder / "tensors").write_text(f"weights of {job}")
    return tmp_path / "ours"


def read(job_dir: Path, *names: str) -> str:
    with os.fdopen(open_file(job_dir, *names)) as file:
        return file.read()


def test_a_file_is_read_and_a_link_is_not(job_dir: Path) -> None:
    place = ("checkpoints", "step_1", "tensors")
    assert read(job_dir, *place) == "weights of ours"
    their = job_dir.parent / "theirs"
    for link, target in (
        ("checkpoints/step_1/tensors", their / "checkpoints/step_1/tensors"),
        ("checkpoints", their / "checkpoints"),
    ):
        (job_dir / link).rename(job_dir / "aside")
        (job_dir / link).symlink_to(target)
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            read(job_dir, *place)
        (job_dir / link).unlink()
        (job_dir / "aside").rename(job_dir / link)
    assert read(job_dir, *place) == "weights of ours"


def test_what_is_no_file_does_not_hold_a_thread(job_dir: Path) -> None:
    os.mkfifo(job_dir / "pipe")
    for name in ("pipe", "checkpoints"):
        with pytest.raises(FileNotFoundError, match="is no file"):
            open_file(job_dir, name)


def test_a_folder_is_deleted_and_not_where_a_link_leads(job_dir: Path) -> None:
    theirs = job_dir.parent / "theirs/checkpoints"
    (job_dir / "checkpoints").rename(job_dir / "aside")
    (job_dir / "checkpoints").symlink_to(theirs)
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        delete_folder(job_dir, "checkpoints", "step_1")
    with pytest.raises(OSError, match="symbolic link"):
        delete_folder(job_dir, "checkpoints")
    assert (theirs / "step_1/tensors").exists()
    delete_folder(job_dir, "aside", "step_1")
    delete_folder(job_dir, "aside", "step_1")
    delete_folder(job_dir, "none", "step_1")
    with opened_folder(job_dir, "aside") as folder:
        assert os.listdir(folder) == []
    delete_folder(job_dir)
    assert not job_dir.exists()
    assert (theirs / "step_1/tensors").exists()

"""Folders of jobs become their tenant's user's, and nothing that a link in them leads to does."""

import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from octet.api_schemas import JobSpec, LaunchOrder, PoolConfig
from octet.api_schemas.resources import RankUser
from octet.service.jobs.job_folders import delete_folder
from octet.worker.rank.warm.order import run_order
from octet.worker.rank.warm.user import NotThatUser, become, give, name_of

USER = RankUser(uid=20_001, gid=20_002)
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone can give folders to other users")

MakeOrder = Callable[[Path], LaunchOrder]


@pytest.fixture
def make_order(spec_document: dict[str, object]) -> MakeOrder:
    def make(job_dir: Path) -> LaunchOrder:
        return LaunchOrder(
            attempt_id=f"att_{'0' * 26}",
            job_id=f"job_{'0' * 26}",
            epoch=1,
            token="secret",
            spec=JobSpec.model_validate(spec_document),
            pool=PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=1),
            report_url="http://127.0.0.1:1",
            user=USER,
            job_dir=str(job_dir),
            checkpoints=(),
            lease_s=60,
            heartbeat_s=2,
        )

    return make


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Make a folder that others can pass through, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


def in_a_child(act: Callable[[], None]) -> str:
    """Run something in a process that is forked for it, and return what it raised, in words."""
    reader, writer = os.pipe()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of Python 3.12, where there are threads
        child = os.fork()
    if child == 0:
        try:
            act()
            os.write(writer, b"done")
        except NotThatUser as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        text = said.read().decode()
    os.waitpid(child, 0)
    return text


def owner(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_uid, found.st_gid


@NEEDS_ROOT
def test_a_folder_is_given_with_all_that_is_in_it_and_no_link_is_followed(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "data/jobs/job_1"
    (elsewhere / "inside").mkdir(parents=True)
    give(folder, USER)
    assert (owner(folder), stat.S_IMODE(folder.stat().st_mode)) == ((20_001, 20_002), 0o700)
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o711
    (folder / "checkpoints/step_1").mkdir(parents=True)
    (folder / "checkpoints/step_1/file").write_text("of root, before the tenant had a user")
    (folder / "link").symlink_to(elsewhere)
    os.chown(folder, 0, 0)
    give(folder, USER)
    assert {owner(path) for path in (folder, *folder.rglob("*"))} == {(20_001, 20_002)}
    assert {owner(path) for path in (elsewhere, elsewhere / "inside")} == {(0, 0)}
    (tmp_path / "data/jobs/job_2").symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        give(tmp_path / "data/jobs/job_2", USER)
    assert owner(elsewhere) == (0, 0)


@NEEDS_ROOT
def test_a_process_becomes_the_user_for_good(make_order: MakeOrder, open_folder: Path) -> None:
    order = make_order(open_folder / "jobs/job_1")

    def check() -> None:
        become(order, USER)
        assert (os.getresuid(), os.getresgid()) == ((20_001,) * 3, (20_002,) * 3)
        assert os.getgroups() == []
        assert (os.environ["HOME"], os.environ["USER"]) == (order.job_dir, "20001")
        assert Path.cwd() == Path(order.job_dir)
        with pytest.raises(PermissionError):
            os.setuid(0)
        assert os.listdir("/proc/self/fd"), "it still sees itself"
        Path("file").write_text("written as the user")

    assert in_a_child(check) == "done"
    assert owner(open_folder / "jobs/job_1/file") == (20_001, 20_002)


CONTROL = 10_001
"""The user and the group of an api and a dispatcher that do not run as root."""


@NEEDS_ROOT
def test_a_control_plane_that_is_not_root_reads_and_deletes_what_the_user_wrote_and_no_other_tenant_does(
    make_order: MakeOrder, open_folder: Path
) -> None:
    os.chown(open_folder, CONTROL, CONTROL)
    order = make_order(open_folder / "jobs/job_1")
    saved = open_folder / "jobs/job_1/checkpoints/step_1"

    def write() -> None:
        become(order, USER)
        saved.mkdir(parents=True)
        (saved / "weights").write_text("written as the user")

    def run_as(uid: int, gid: int, act: Callable[[], object]) -> str:
        def become_and_act() -> None:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            act()

        return in_a_child(become_and_act)

    assert in_a_child(write) == "done"
    for act in (saved.joinpath("weights").read_bytes, lambda: os.listdir(open_folder / "jobs/job_1")):
        assert run_as(USER.uid + 1, USER.gid + 1, act) == "", "another tenant"
        assert run_as(USER.uid + 1, USER.gid, act) == "", "another tenant of the same group"
    assert run_as(CONTROL, CONTROL, saved.joinpath("weights").read_bytes) == "done"
    assert run_as(CONTROL, CONTROL, lambda: delete_folder(open_folder / "jobs/job_1")) == "done"
    assert os.listdir(open_folder / "jobs") == []


@NEEDS_ROOT
def test_a_group_that_the_user_is_in_shares_nothing(make_order: MakeOrder, open_folder: Path) -> None:
    os.chown(open_folder, CONTROL, USER.gid)
    order = make_order(open_folder / "jobs/job_1")
    assert in_a_child(lambda: become(order, USER)) == "done"
    assert stat.S_IMODE((open_folder / "jobs/job_1").stat().st_mode) == 0o700


@NEEDS_ROOT
def test_a_closed_folder_on_the_way_is_named(make_order: MakeOrder, open_folder: Path) -> None:
    (open_folder / "closed").mkdir(mode=0o700)
    order = make_order(open_folder / "closed/jobs/job_1")
    said = in_a_child(lambda: become(order, USER))
    assert said.endswith(f"let others pass through {open_folder / 'closed'}: chmod o+x")


def test_a_node_that_does_not_run_as_root_says_so(
    make_order: MakeOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 10_001)
    with pytest.raises(NotThatUser, match=r"pool cpu .* as user 20001, and Ray runs as user 10001 .*\. Run Ray as root"):
        become(make_order(tmp_path), USER)


def test_a_process_that_is_not_the_ranks_own_does_not_become_it(make_order: MakeOrder, tmp_path: Path) -> None:
    order = make_order(tmp_path)
    outcome, reason, message = run_order(order.model_dump_json(), {}, datetime.now(UTC))
    assert (outcome, reason) == ("failed", "launch_failed")
    assert "a process that was forked for them" in message


def test_a_user_has_its_name_or_its_number() -> None:
    assert name_of(0) == "root"
    assert name_of(4_000_000_000) == "4000000000"

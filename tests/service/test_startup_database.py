"""A database that `octet serve` cannot write: it ends at once, with a message that says what to change, and without a trace."""

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from octet.service.app import create_app
from octet.service.processes.startup import database_of_one_machine
from octet.service.settings import Settings
from tests.kit.small_disk import small_disk
from tests.kit.waiting import LONG_S
from tests.service.conftest import POOLS
from tests.service.test_locked_database import locked

ROOT = Path(__file__).parent.parent.parent


def open_database(folder: Path) -> None:
    database_of_one_machine(Settings(data_dir=folder, pools=POOLS), lock_timeout_s=0.05).close()


def test_a_new_and_a_former_database_are_opened(tmp_path: Path) -> None:
    open_database(tmp_path)
    open_database(tmp_path)
    assert (tmp_path / "octet.db").is_file()


def test_a_new_one_needs_no_migrations(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from sqlalchemy import text; from octet.service.settings import Settings\n"
        "from octet.service.processes.startup import database_of_one_machine\n"
        "database = database_of_one_machine(Settings(data_dir=Path(sys.argv[1])))\n"
        "with database.read() as session: assert session.execute(text('SELECT count(*) FROM jobs')).scalar() == 0\n"
        "assert 'alembic' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_that_another_process_writes(tmp_path: Path) -> None:
    with locked(f"sqlite:///{tmp_path / 'octet.db'}"), pytest.raises(RuntimeError) as raised:
        open_database(tmp_path)
    assert "database is locked. Another process writes to it: end that one" in str(raised.value)
    assert str(tmp_path / "octet.db") in str(raised.value)


def test_a_lock_between_opening_and_serving_does_not_end_the_server(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, pools=POOLS)
    database = database_of_one_machine(settings, lock_timeout_s=0.05)
    app = create_app(settings, database=database)
    with locked(f"sqlite:///{tmp_path / 'octet.db'}"), TestClient(app, base_url="http://127.0.0.1:8000") as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/v1/jobs").status_code == 200
    database.close()


def test_one_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        disk.fill()
        with pytest.raises(RuntimeError, match=r"cannot be used: .*\. (Free some space|Look at)"):
            open_database(disk.path)
        disk.free()
        open_database(disk.path)


def write_something_else(folder: Path) -> None:
    (folder / "octet.db").write_text("not a database, and long enough to be looked at" * 100)


def damage(folder: Path) -> None:
    connection = sqlite3.connect(folder / "octet.db")
    connection.execute("CREATE TABLE jobs (id TEXT)")
    connection.commit()
    connection.close()
    content = (folder / "octet.db").read_bytes()
    (folder / "octet.db").write_bytes(content[:100] + b"\xff" * (len(content) - 100))


@pytest.mark.parametrize(
    ("prepare", "words"), [(write_something_else, "not a database"), (damage, "malformed")], ids=["another-program", "damaged"]
)
def test_one_that_is_no_database(tmp_path: Path, prepare: Callable[[Path], None], words: str) -> None:
    prepare(tmp_path)
    with pytest.raises(RuntimeError, match=words):
        open_database(tmp_path)


@pytest.mark.system
def test_the_command_ends_with_status_2_and_one_line(tmp_path: Path) -> None:
    write_something_else(tmp_path)
    command = [sys.executable, "-m", "octet.client.cli", "serve", "--port", "8766", "--data-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG_S, cwd=ROOT)
    assert result.returncode == 2, result.stderr
    assert "move it away" in result.stderr
    assert "Traceback" not in result.stderr

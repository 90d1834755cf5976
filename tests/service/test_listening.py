"""The API's socket."""

import asyncio
import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from octet.service.processes.startup import listening, log_to_stderr
from octet.service.settings import Settings


def test_answers_are_sent_at_once(tmp_path: Path) -> None:
    """asyncio turns Nagle's algorithm off for the connections of this socket."""

    async def delay_is_off(listener: socket.socket) -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def note(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            accepted.set_result(option)

        async with await asyncio.start_server(note, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            option = await accepted
            writer.close()
            return option

    with listening(Settings(data_dir=tmp_path, port=0)) as (listener,):
        assert asyncio.run(delay_is_off(listener)) == 1


def test_a_taken_port_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from octet.client.cli.app import main\n"
        "try:\n    main()\n"
        "finally:\n    print(*sorted({'ray', 'sqlalchemy', 'fastapi', 'alembic'} & set(sys.modules)))"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-c", code, "serve", "--port", str(port), "--data-dir", str(tmp_path / "octet")]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "--port" in ended.stderr
    assert ended.stdout.strip() == ""
    assert not (tmp_path / "octet").exists()


def test_a_servers_log_leaves_out_the_lines_of_alembic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    alembic = logging.getLogger("alembic")
    monkeypatch.setattr(alembic, "level", logging.INFO)
    log_to_stderr()
    assert not logging.getLogger("alembic.runtime.plugins").isEnabledFor(logging.INFO)
    assert alembic.isEnabledFor(logging.WARNING)

"""The API's socket."""

import asyncio
import socket
from pathlib import Path

from octet.service.processes.startup import listening
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

    with listening(Settings(data_dir=tmp_path, port=0)) as listener:
        assert asyncio.run(delay_is_off(listener)) == 1

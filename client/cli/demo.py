"""The command that compares precision levels: demo."""

import time
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from octet.client.api import Client
from octet.client.cli.options import FAILED, Commands, connect, require_extras
from octet.client.demo.job import demo_spec
from octet.client.demo.run import run_demo, run_demo_on_own_server
from octet.client.terminal import Terminal


def demo(
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps of each job.")] = 300,
    levels: Annotated[str, typer.Option("--levels", help="Precision levels, the yardstick first.")] = "fp32,O2",
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Default: a temporary folder.")] = None,
    url: Annotated[str | None, typer.Option("--url", help="Use a running server instead of one of our own.")] = None,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="With --url: seconds for the server to be ready.")] = 0,
    stay: Annotated[bool, typer.Option("--stay", help="Leave our own server and its page up until Ctrl-C.")] = False,
) -> None:
    """Train the same small GPT at several levels and compare them. Exit 0 if all succeed and, given enough steps, learn."""
    comparison = f"demo-{uuid.uuid4().hex[:8]}"
    specs = [demo_spec(level.strip(), steps, comparison) for level in levels.split(",")]
    if url is None:
        require_extras("demo", "service", "worker")
        has_passed = run_demo_on_own_server(Terminal(), specs, data_dir=data_dir, stays=stay)
    elif stay:
        raise typer.BadParameter(f"{url} stays up anyway. Leave out --stay or --url.", param_hint="--stay")
    else:
        with connect(url) as client:
            _wait_until_ready(client, wait_s)
            has_passed = run_demo(Terminal(), specs, client)
    if not has_passed:
        raise typer.Exit(FAILED)


def _wait_until_ready(client: Client, timeout_s: float) -> None:
    """Wait for a server that was started at the same time as the demo. If it is not ready then, the first request says why."""
    deadline = time.monotonic() + timeout_s
    with Terminal().spinner("waiting for the server to be ready") if timeout_s else nullcontext():
        while time.monotonic() < deadline and not client.is_ready():
            time.sleep(0.5)


COMMANDS: Commands = {"demo": demo}

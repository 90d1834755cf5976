"""Run the demo's jobs, on a server that runs already or on one of its own, and show how they compare."""

import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.text import Text

from octet.api_schemas import Job, JobSpec, JobState
from octet.client.api import Client
from octet.client.demo.comparison import (
    has_learned,
    learning_line,
    side_by_side,
    start_times,
    summary_of,
    too_short_line,
    verdict,
)
from octet.client.demo.job import is_long_enough_to_judge
from octet.client.demo.own_server import OwnServer, handled, leave, own_server
from octet.client.errors import OctetError
from octet.client.render import Lines, job_details
from octet.client.terminal import Terminal
from octet.client.watch import watch

_LOG_LINES_SHOWN = 20
_POLL_S = 0.5


def run_demo(terminal: Terminal, specs: Sequence[JobSpec], client: Client) -> bool:
    """Compare the jobs on a server that runs.

    Returns True if every job succeeded and, where it had steps enough to be judged, learned.
    """
    with handled(leave, signal.SIGTERM, signal.SIGHUP):
        return _compare(client, specs, terminal)


def run_demo_on_own_server(terminal: Terminal, specs: Sequence[JobSpec], *, data_dir: Path | None, stays: bool = False) -> bool:
    """Do the same on a server that is started before and stopped after. A temporary folder is kept on failure.

    stays: leave the server and its page up until Ctrl-C.
    """
    folder = data_dir or Path(tempfile.mkdtemp(prefix="octet-demo-"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    has_failed = True
    try:
        with (
            handled(leave, signal.SIGTERM, signal.SIGHUP),
            own_server(folder, specs[0].data.path, terminal) as server,
            Client(server.url) as client,
        ):
            has_failed = not _compare(client, specs, terminal, server.check)
            if stays:
                _stay(server, terminal)
            else:
                terminal.show(Text("The server and its page end now; octet demo --stay (make demo STAY=1) leaves them up."))
    except (KeyboardInterrupt, SystemExit):
        has_failed = False  # nobody will look for the reason
        raise
    finally:
        if has_failed:
            terminal.complain(f"The server's log is {folder / 'server.log'}; the jobs' files are in the same folder.")
        elif data_dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    return not has_failed


def _stay(server: OwnServer, terminal: Terminal) -> None:
    """Wait for Ctrl-C, which is no failure here. Raises ServerFailed if the server ends by itself."""
    terminal.show(Text("The server stays up. Ctrl-C ends it."))
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            server.check()
            time.sleep(_POLL_S)


def page_of(url: str, jobs: Sequence[Job]) -> str:
    """Return the address of the page that compares the jobs, or that shows the only one."""
    ids = [job.id for job in jobs]
    return f"{url}/compare?jobs={','.join(ids)}" if len(ids) > 1 else f"{url}/jobs/{ids[0]}"


def _compare(client: Client, specs: Sequence[JobSpec], terminal: Terminal, check: Callable[[], None] = lambda: None) -> bool:
    submitted: list[Job] = []
    try:
        for spec in specs:
            submitted.append(client.submit(spec))
        page = page_of(client.url, submitted)
        terminal.show(Text(f"Watch the jobs on {page}"))
        jobs = watch(client, [job.id for job in submitted], terminal, check=check)
    except BaseException:
        for job in submitted:
            with contextlib.suppress(OctetError):
                client.cancel(job.id)
        raise
    unsuccessful = [job for job in jobs if job.state is not JobState.SUCCEEDED]
    for job in unsuccessful:
        terminal.show(job_details(job, []))
        lines = Lines(has_several_ranks=job.spec.resources.workers > 1)
        for line in client.logs(job.id, tail=_LOG_LINES_SHOWN):
            terminal.show(lines.log(line))
    if unsuccessful:
        terminal.show(Text(f"FAILED: {', '.join(f'{job.name} {job.state}' for job in unsuccessful)}."))
    has_passed = not unsuccessful and _report(jobs, terminal)
    terminal.show(Text(f"The jobs on the page: {page}"))
    return has_passed


def _report(jobs: Sequence[Job], terminal: Terminal) -> bool:
    """Show how the jobs compare; return whether the demo passed."""
    is_judged = all(is_long_enough_to_judge(job.spec) for job in jobs)
    have_learned = all(has_learned(summary_of(job)) for job in jobs)
    terminal.show("")
    terminal.show(Text(learning_line(jobs) if is_judged else too_short_line(jobs)))
    for table in (side_by_side(jobs), start_times(jobs)):
        terminal.show("")
        terminal.show(table)
    terminal.show("")
    outcome = ("Passed" if have_learned else "FAILED to learn") if is_judged else "Too short to judge"
    terminal.show(Text(f"{outcome}: {verdict(jobs)}"))
    return have_learned or not is_judged

"""`octet demo`: the same byte-level GPT at several precision levels, on the Python standard library's own source.

Everything goes through the REST API, as any user's job would.
"""

import contextlib
import shutil
import signal
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.text import Text

from api_schemas import Job, JobSpec, JobState
from client.api import Client
from client.comparison import entropy_line, has_learned, side_by_side, start_times, summary_of, verdict
from client.errors import OctetError
from client.job_file import check_spec
from client.own_server import own_server
from client.render import job_details, log_line
from client.signals import handled, leave
from client.terminal import Terminal
from client.watch import watch

_LOG_LINES_SHOWN = 20
_NOT_THE_LIBRARY = ("site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__")


def demo_spec(level: str, steps: int, comparison: str) -> JobSpec:
    """Gpt-tiny (0.86 M parameters) on the standard library, 2048 bytes a step.

    Measured at fp32 on one core: 300 steps take 41 s and reach an evaluation loss of 69 % of the unigram entropy, 400
    steps 57 s and 66 %. As many bytes in 200 steps of 16 × 256 reach 74 %; learning rates 2e-3 and 4e-3 reach 67 %.
    """
    document = {
        "name": f"demo-{level}",
        "model": {"family": "gpt", "preset": "gpt-tiny"},
        "precision": {"level": level},
        "data": {
            "source": "text",
            "path": sysconfig.get_path("stdlib"),
            "include": ["**/*.py"],
            "exclude": [f"**/{folder}/**" for folder in _NOT_THE_LIBRARY],
        },
        "training": {
            "steps": steps,
            "global_batch_size": 16,
            "sequence_length": 128,
            "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]},
            "schedule": {"name": "cosine", "warmup_steps": min(20, steps // 10)},
            "gradient_clip": 1.0,
            "eval_every": 100,
            "checkpoint_every": 100,
            "seed": 0,
        },
        "resources": {"pool": "cpu", "workers": 1},
        "retry": {"max_failures": 1},
        "labels": {"comparison": comparison},
    }
    return check_spec(document, f"the demo's job at level {level}")


def run_demo(terminal: Terminal, specs: Sequence[JobSpec], client: Client) -> bool:
    """Compare the jobs on a server that runs. True if every job succeeded and learned."""
    with handled(leave, signal.SIGTERM, signal.SIGHUP):
        return _compare(client, specs, terminal)


def run_demo_on_own_server(terminal: Terminal, specs: Sequence[JobSpec], *, data_dir: Path | None) -> bool:
    """The same, on a server that is started for it and stopped after it. A temporary folder is kept on failure."""
    folder = data_dir or Path(tempfile.mkdtemp(prefix="octet-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    has_failed = True
    try:
        with (
            handled(leave, signal.SIGTERM, signal.SIGHUP),
            own_server(folder, specs[0].data.path, terminal) as server,
            Client(server.url) as client,
        ):
            has_failed = not _compare(client, specs, terminal, server.check)
    except (KeyboardInterrupt, SystemExit):
        has_failed = False  # nobody will look for the reason
        raise
    finally:
        if has_failed:
            terminal.complain(f"The server's log is {folder / 'server.log'}; the jobs' files are beside it.")
        elif data_dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    return not has_failed


def _compare(client: Client, specs: Sequence[JobSpec], terminal: Terminal, check: Callable[[], None] = lambda: None) -> bool:
    submitted: list[Job] = []
    try:
        for spec in specs:
            submitted.append(client.submit(spec))
        jobs = watch(client, [job.id for job in submitted], terminal, check=check)
    except BaseException:
        with contextlib.suppress(OctetError):
            for job in submitted:
                client.cancel(job.id)
        raise
    unsuccessful = [job for job in jobs if job.state is not JobState.SUCCEEDED]
    for job in unsuccessful:
        terminal.show(job_details(job, []))
        for line in list(client.logs(job.id))[-_LOG_LINES_SHOWN:]:
            terminal.show(log_line(line))
    if unsuccessful:
        terminal.show(Text(f"FAILED: {', '.join(f'{job.name} {job.state}' for job in unsuccessful)}."))
        return False
    return _report(jobs, terminal)


def _report(jobs: Sequence[Job], terminal: Terminal) -> bool:
    has_passed = all(has_learned(summary_of(job)) for job in jobs)
    terminal.show("")
    terminal.show(Text(entropy_line(jobs)))
    for table in (side_by_side(jobs), start_times(jobs)):
        terminal.show("")
        terminal.show(table)
    terminal.show("")
    terminal.show(Text(f"{'Passed' if has_passed else 'FAILED to learn'}: {verdict(jobs)}"))
    return has_passed

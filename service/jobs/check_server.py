"""Check files in processes with limits: `python -m octet.service.jobs.check_server`, which the API starts.

It loads the contracts once. For each socket that comes over its standard input it forks a child, which answers one line of
JSON for each that it reads there, so a child costs a fork and shares what is loaded. A check that needs more memory or time
than it may have ends its child at most. Everything ends when the API does.
"""

import gc
import json
import os
import resource
import signal
import socket
from contextlib import suppress
from typing import NamedTuple, NoReturn

from pydantic import TypeAdapter

from octet.api_schemas import Files, Violation
from octet.service.errors import InvalidRequest
from octet.service.jobs.file_checks import Inputs, check_files

MEMORY_BYTES = 128 << 20
"""The most that a check may allocate, so eight at once take a GiB. Most JSON takes 3 times its size, the worst 24 times."""
GROWN_BYTES = 64 << 20
"""A child that once had so much in memory ends, and gives it back. One that has checked small files has 32 MB."""
GRACE_S = 1.0
"""The API waits so much longer than a check may take, and its process ends after twice as long. A listing that takes long is
refused by name before that."""


class Asked(NamedTuple):
    """A check: the files that a job reads, and those that it may."""

    inputs: Inputs
    files: Files


class Answer(NamedTuple):
    """The result of a check. violation: what is wrong with the job. fault: our own error. is_last: the child ends."""

    violation: Violation | None = None
    fault: str | None = None
    is_last: bool = False


ASKED, ANSWER = TypeAdapter(Asked), TypeAdapter(Answer)


def main() -> int:
    """Fork a child for each socket that arrives, until the API closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the API decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=0)
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return 0
        if not os.fork():
            control.close()
            _serve(descriptors[0])
        os.close(descriptors[0])


def _serve(descriptor: int) -> NoReturn:
    """Answer checks until the other end is closed or a check has taken much memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # Linux has it
        score.write("1000")  # where memory ends all the same, these are the processes to end
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as lines:
        for line in lines:
            answer = _answer(line)
            connection.sendall(ANSWER.dump_json(answer) + b"\n")
            if answer.is_last:
                break
    os._exit(0)


def _answer(line: bytes) -> Answer:
    asked = ASKED.validate_json(line)
    if asked.files.timeout_s is not None:
        signal.setitimer(signal.ITIMER_REAL, asked.files.timeout_s + 2 * GRACE_S)  # SIGALRM ends the process
    try:
        check_files(*asked)
    except InvalidRequest as error:
        answer = Answer(error.errors[0])
    except MemoryError:
        answer = Answer(too_much_memory(asked.inputs), is_last=True)
    except Exception as error:  # noqa: BLE001 - the API answers 500 for it and logs it
        answer = Answer(fault=f"{type(error).__name__}: {error}"[:1000])
    else:
        answer = Answer()
    signal.setitimer(signal.ITIMER_REAL, 0)
    has_grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 > GROWN_BYTES
    return answer._replace(is_last=answer.is_last or has_grown)


def too_much_memory(inputs: Inputs) -> Violation:
    """Build the refusal of files that cannot be checked in the memory of a check."""
    return Violation(
        field="data",
        got=named(inputs),
        allowed=f"files whose check takes at most {MEMORY_BYTES >> 20} MiB of memory",
        message="A configuration, a tokenizer's settings, an index or a line of data is too large. Make it smaller.",
    )


def named(inputs: Inputs) -> str:
    """Name the paths that a job reads."""
    paths = (inputs.data.path, getattr(inputs.data, "tokenizer", None), inputs.model.files)
    return json.dumps(", ".join(dict.fromkeys(path for path in paths if path)))[1:-1]


if __name__ == "__main__":
    raise SystemExit(main())

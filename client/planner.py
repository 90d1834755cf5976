"""Trace jobs on this machine, in the planner's process (`octet.worker.planning`), which needs octet-fp8[worker]."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from octet.api_schemas.data.files import ANY_FILE
from octet.api_schemas.plan import NO_TRITON, TraceReply, TraceRequest, read_configs, trace_key


def trace_here(requests: Sequence[TraceRequest]) -> Iterator[TraceReply]:
    """Yield a reply to each request as it comes: the peak, or why there is none. The process is started for them, if any.

    It is sent one of those that one trace serves.
    """
    if not requests:
        return
    if find_spec("torch") is None:
        reason = "only states: a peak needs pip install 'octet-fp8[worker]'"
        yield from (TraceReply(id=request.id, reason=reason) for request in requests)
        return
    if find_spec("triton") is None:
        yield from (TraceReply(id=request.id, reason=f"only states: {NO_TRITON}") for request in requests)
        return
    readable, unread = read_configs(requests, ANY_FILE)
    yield from unread
    by_key: dict[str, list[TraceRequest]] = {}
    for request in readable:
        by_key.setdefault(trace_key(request), []).append(request)
    served = {first.id: [request.id for request in (first, *others)] for first, *others in by_key.values()}
    answers = {first: TraceReply(id=first, more=True) for first in served}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "octet.worker.planning")
    with tempfile.TemporaryFile("w+") as lines, tempfile.TemporaryFile("w+", errors="replace") as errors:
        lines.writelines(f"{first.model_dump_json()}\n" for first, *_ in by_key.values())
        lines.seek(0)
        with subprocess.Popen(
            command, stdin=lines, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    reply = TraceReply.model_validate_json(line)
                    answers[reply.id] = reply
                    yield from (reply.model_copy(update={"id": each}) for each in served[reply.id])
            except GeneratorExit:
                process.terminate()  # nobody reads the other replies
                raise
        errors.seek(0)
        reason = f"the planner's process ended with status {process.returncode}: {errors.read()[-300:]}"
    for answer in answers.values():
        if answer.more:
            yield from (answer.model_copy(update={"id": each, "more": False, "reason": reason}) for each in served[answer.id])

"""Trace jobs on this machine, in the planner's process (`octet.worker.planning`), which needs octet-fp8[worker]."""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from octet.api_schemas.data.files import ANY_FILE
from octet.api_schemas.plan import TraceReply, TraceRequest, read_configs


def trace_here(requests: Sequence[TraceRequest]) -> list[TraceReply]:
    """Return a reply to each request: the peak, or why there is none. The process is started for them, if any, and ends."""
    if not requests:
        return []
    if find_spec("torch") is None:
        reason = "only states: a peak needs pip install 'octet-fp8[worker]'"
        return [TraceReply(id=request.id, reason=reason) for request in requests]
    readable, replies = read_configs(requests, ANY_FILE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    lines = "".join(f"{request.model_dump_json()}\n" for request in readable)
    command = (sys.executable, "-m", "octet.worker.planning")
    done = subprocess.run(command, input=lines, env=environment, capture_output=True, text=True, check=False)
    replies += [TraceReply.model_validate_json(line) for line in done.stdout.splitlines()]
    answered = {reply.id for reply in replies}
    reason = f"the planner's process ended with status {done.returncode}: {done.stderr[-300:]}"
    return replies + [TraceReply(id=request.id, reason=reason) for request in requests if request.id not in answered]

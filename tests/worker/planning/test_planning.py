"""The planner: extrapolated moments are those of all blocks, traces hold what the closed form says, its process answers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from octet.api_schemas import ANY_FILE
from octet.api_schemas.peak import PEAK_CLASSES
from octet.api_schemas.plan import (
    PlanRequest,
    TraceReply,
    TraceRequest,
    candidates,
    read_configs,
    rows_of,
    traces_of,
)
from octet.api_schemas.training import AdapterSpec
from octet.client.planner import trace_here
from octet.worker.planning.curve import Moment
from octet.worker.planning.moments import extrapolate
from octet.worker.planning.trace import Trace
from tests.kit.waiting import LONG_S, wait_until
from tests.worker.planning.traced import CASES, GPT, LLAMA, NUM_BLOCKS, QWEN3, spec_of

ROOT = Path(__file__).parent.parent.parent.parent


def run(*command: str, lines: str = "") -> str:
    """Run a Python module whose Triton kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        input=lines,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def traced(*names: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("tests.worker.planning.traced", *names))
    return found


MARKS = {
    "saving": pytest.mark.system,
    "llama O3-split": pytest.mark.system,
    "ZeRO 1": pytest.mark.system,
    "muon": pytest.mark.system,
    "pipeline, rank 0": pytest.mark.system,
    "pipeline in bf16, rank 0": pytest.mark.system,
    "llama ao": pytest.mark.system,
    "mixture bf16-amp": pytest.mark.system,
    "mixture O2": pytest.mark.system,
    "pipeline, interleaved": pytest.mark.system,
    "transformers, ZeRO 3": pytest.mark.system,
}
NAMES = [pytest.param(name, marks=MARKS.get(name, pytest.mark.matrix)) for name in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_extrapolated_moments_are_those_of_all_blocks(name: str) -> None:
    found = traced(name)
    assert found["peak"] == pytest.approx(found["whole_peak"], rel=0.001)
    assert found["before"][0] == pytest.approx(found["before"][1], rel=0.001)
    assert found["peak"] > found["before"][0] > 0


@pytest.mark.system
def test_micro_batches_in_flight_keep_one_copy_of_weights_in_bf16() -> None:
    """Three are in flight on the first rank of three, with 64 tokens each; a block has 12 × 2048² weights."""
    copy, activations = 5 * 12 * 2048**2 * 2, 5 * 64 * 2048 * 40
    assert copy < traced("pipeline in bf16, rank 0")["by_class"]["activations"] < copy + 3 * activations


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_trace_holds_what_the_closed_form_says(name: str) -> None:
    """`other` has the optimizer's counters on a GPU, 8 bytes for each parameter."""
    found = traced(name)
    for kind, num_bytes in found["planned"].items():
        assert found["held"][kind] == pytest.approx(found["whole_held"][kind], rel=0.001), kind
        if kind != "other":
            assert found["held"][kind] == pytest.approx(num_bytes, rel=0.005), kind
    assert 0 <= found["held"]["other"] - found["planned"]["other"] <= 8 * found["num_parameters"]
    alive = sum(num_bytes for kind, num_bytes in found["held"].items() if kind != "gradients")
    # A trace rounds each tensor up to 512 bytes; a parameter has its states, scales and a counter beside it.
    rounded_up = 8 * 511 * found["num_parameters"]
    assert found["before"][0] == pytest.approx(alive, rel=0.001, abs=rounded_up), "between steps nothing but states is alive"


OPTIONS = {json.dumps({**case, "level": None}): name for name, case in CASES.items()}
"""Cases that differ by more than their level."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.system if name in ("ZeRO 3", "mixture O3-split-8bit") else pytest.mark.matrix)
        for name in OPTIONS.values()
    ],
)
def test_one_trace_serves_all_levels_with_the_same_passes(name: str) -> None:
    for level, found in traced("shared", name).items():
        own, shared = found["own"], found["shared"]
        assert (own["states_agree"], shared["states_agree"]) == (True, True), level
        peak, rounded_up = own["peak_bytes"], 511 * found["num_parameters"]
        assert shared["peak_bytes"] == pytest.approx(peak, rel=0.001, abs=rounded_up), level
        for kind, num_bytes in own["peak_by_class"].items():
            assert shared["peak_by_class"][kind] == pytest.approx(num_bytes, abs=max(0.001 * peak, rounded_up)), (level, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param("llama", marks=pytest.mark.system), pytest.param("gpt", marks=pytest.mark.matrix)]
)
def test_packed_documents_are_traced_without_a_mask(family: str) -> None:
    """A step with documents takes what one without takes, but for their starts and positions."""
    found = traced(f"packed {family}")
    packed, whole = found["packed"], found["whole"]
    assert "aten._flash_attention_forward.default" in packed["ops"]
    assert not packed["squares"]
    assert abs(packed["peak"] - whole["peak"]) < 2 * 1024 * 1024  # the bytes of a mask of one layer


@pytest.mark.slow
@pytest.mark.system
def test_ops_made_from_their_shapes_leave_the_moments_as_torch_makes_them() -> None:
    """Each op of these steps has its results made by torch's own fake tensors, too."""
    for name, (is_equal, num_moments) in traced("by torch").items():
        assert num_moments > 100
        assert is_equal, name


@pytest.mark.system
def test_lines_give_the_peak_of_wider_micro_batches() -> None:
    found = traced("wider")
    assert found["peak"] == pytest.approx(found["whole_peak"], rel=0.002)


def test_a_peak_that_moves_is_found() -> None:
    """With few blocks the head holds the peak, with many the first block's backward pass: a line through the peaks is low."""

    def planted(num_blocks: int) -> Trace:
        forward = [alive("block", 10 * number) for number in range(1, num_blocks + 1)]
        forward += [alive("head", 10 * num_blocks + 100, logits=100)]
        backward = [alive("head", 10 * num_blocks + 100, logits=100)]
        backward += [alive("block", 40 * number + 20) for number in range(num_blocks, 0, -1)]
        return Trace([forward, backward], num_blocks, {"weights": num_blocks}, {"tensor sum float32": 5 + num_blocks})

    found = extrapolate([[planted(2), planted(3)]], (2, 3), 20)
    peaks = [max(moment.num_bytes for phase in planted(number).phases for moment in phase) for number in (2, 3, 20)]
    assert max(first for first, _ in found.moments) == peaks[2] == 820
    assert peaks[0] + 18 * (peaks[1] - peaks[0]) < peaks[2]
    assert (found.before, found.held) == (20, {"weights": 20})
    assert found.sent == {"tensor sum float32": 25}
    assert {kind: number for kind, number in found.by_class.items() if number} == {"activations": 820}


def alive(op: str, num_bytes: int, logits: int = 0) -> Moment:
    by_class = dict.fromkeys(PEAK_CLASSES, 0) | {"logits": logits, "activations": num_bytes - logits}
    return Moment(op, num_bytes, tuple(by_class.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_classes_of_a_peak_add_up_and_are_those_of_all_blocks(name: str) -> None:
    found = traced(name)
    by_class, peak = found["by_class"], found["peak"]
    assert sum(by_class.values()) == peak
    assert min(by_class.values()) >= 0
    for kind, num_bytes in found["whole_by_class"].items():
        assert by_class[kind] == pytest.approx(num_bytes, abs=0.001 * peak), kind
        if kind in ("weights", "master_weights", "exp_avg", "exp_avg_sq"):
            assert num_bytes == pytest.approx(found["whole_held"][kind], rel=0.005), kind
    assert sum(by_class[kind] for kind in ("activations", "logits", "communication", "temporary")) > 0


@pytest.mark.system
def test_a_folder_is_planned_by_its_configuration(tmp_path: Path) -> None:
    """No weights are there, nor opened."""
    qwen3, mixture = (
        dict(QWEN3["config"]),
        {"num_hidden_layers": 4, "num_local_experts": 4, "architectures": ["MixtralForCausalLM"]},
    )
    for name, config in (("qwen3", qwen3), ("mixtral", qwen3 | mixture)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"model_type": name}))
    jobs = [spec_of({"family": "huggingface", "path": str(tmp_path / name)}) for name in ("qwen3", "mixtral", "nowhere")]
    jobs.append(jobs[0].model_copy(update={"adapter": AdapterSpec()}))
    found = [candidate for job in jobs for candidate in candidates(PlanRequest(job=job, levels=("O2",)))]
    requests, unread = read_configs(traces_of(found), ANY_FILE)
    lines = "".join(f"{request.model_dump_json()}\n" for request in requests)
    replies = [TraceReply.model_validate_json(line) for line in run("octet.worker.planning", lines=lines).splitlines()]
    of_folder, of_mixture, of_nowhere, of_adapters = rows_of(found, [], [*replies, *unread])
    assert of_folder.peak_bytes is not None, of_folder.reason
    assert (of_folder.states_agree, of_folder.converted_layers) == (True, 7 * NUM_BLOCKS)
    assert of_adapters.peak_bytes is not None, of_adapters.reason
    assert (of_adapters.states_agree, of_adapters.converted_layers) == (True, 7 * NUM_BLOCKS)
    assert of_adapters.peak_bytes < of_folder.peak_bytes
    assert of_mixture.peak_bytes is not None, of_mixture.reason
    assert of_mixture.states_agree is True
    assert of_mixture.converted_layers == 4 * (4 + 2 * 4), "each expert is two layers"
    assert sum((of_mixture.states or {}).values()) > sum((of_folder.states or {}).values())
    assert (of_nowhere.states, of_nowhere.possible) == (None, True)
    assert "a folder with config.json" in (of_nowhere.reason or "")


@pytest.mark.system
def test_the_process_answers_a_line_for_each_request() -> None:
    jobs = {
        "traced": spec_of(LLAMA),
        "torchao": spec_of(level="ao"),
        "stages": spec_of(workers=2, parallelism={"pipeline": 2}, training={"micro_batch_size": 1}),
        "large": spec_of(GPT | {"num_layers": 96}),
    }
    lines = [TraceRequest(id=name, job=job).model_dump_json() for name, job in jobs.items()]
    replies = [
        TraceReply.model_validate_json(line)
        for line in run("octet.worker.planning", lines="\n".join(lines) + "\n").splitlines()
    ]
    found = {reply.id: reply for reply in replies if not reply.more}
    assert found.keys() == jobs.keys()
    early = [reply for reply in replies if reply.more]
    assert early, "no peak came before those of wider micro-batches"
    for reply in early:
        last = found[reply.id].peak
        assert replies.index(reply) < replies.index(found[reply.id])
        assert reply.peak is not None
        assert last is not None
        assert reply.peak == last.model_copy(update={"by_micro_batch": ()})
    assert found["torchao"].peak is not None
    assert found["stages"].peak is not None
    assert found["traced"].peak is not None
    assert found["large"].peak is not None
    assert found["large"].peak.bytes > found["large"].peak.before > 0
    most = found["traced"].peak.bytes
    assert (found["traced"].peak.largest_micro_batch(2, 4 * most) or 0) >= 2


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("case", [{"level": "O3"}, {"workers": 4, "parallelism": {"zero_stage": 3}}], ids=["O3", "ZeRO 3"])
def test_traces_serve_every_depth(case: dict[str, Any]) -> None:
    deeper = TraceRequest(id="deeper", job=spec_of(LLAMA | {"num_layers": 40}, **case)).model_dump_json() + "\n"
    with tracing("as deep as it was traced", **case) as (process, stdin, stdout, _):
        first = last_reply(stdout)
        cpu_s = psutil.Process(process.pid).cpu_times().children_user
        stdin.write(deeper)
        stdin.flush()
        found = last_reply(stdout)
        assert psutil.Process(process.pid).cpu_times().children_user == cpu_s > 0, "no other child traced"
        stdin.close()
        assert process.wait(LONG_S) == 0
    assert found == TraceReply.model_validate_json(run("octet.worker.planning", lines=deeper).splitlines()[-1])
    assert found.peak is not None
    assert first.peak is not None
    assert found.peak.bytes > first.peak.bytes


def last_reply(stdout: IO[str]) -> TraceReply:
    """Return the next reply after which none of its request follows."""
    replies = (TraceReply.model_validate_json(line) for line in stdout)
    return next(reply for reply in replies if not reply.more)


@contextmanager
def tracing(*names: str, **case: Any) -> Iterator[tuple["subprocess.Popen[str]", IO[str], IO[str], Path]]:
    """Start a planner with a job of each name. Yields it, its input, its output, and the file that lists its children."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "octet.worker.planning"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for name in names:
            process.stdin.write(TraceRequest(id=name, job=spec_of(LLAMA, **case)).model_dump_json() + "\n")
        process.stdin.flush()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: bool(children.read_text()))
        yield process, process.stdin, process.stdout, children


@pytest.mark.slow
@pytest.mark.system
def test_a_child_that_is_killed_is_the_reason_for_one_job_alone() -> None:
    with tracing("killed", "traced") as (process, stdin, stdout, children):
        os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
        killed, traced_job = last_reply(stdout), last_reply(stdout)
        stdin.close()
        assert process.wait(LONG_S) == 0
    assert killed.id == "killed"
    assert "status 9" in (killed.reason or "")
    assert traced_job.id == "traced"
    assert traced_job.peak is not None


@pytest.mark.system
def test_a_process_that_is_killed_leaves_the_peaks_that_it_had_traced() -> None:
    jobs = [spec_of(LLAMA, training={"sequence_length": length}) for length in (16, 32, 48, 64)]
    requests = [TraceRequest(id=str(index), job=job) for index, job in enumerate(jobs)]
    last: dict[str, TraceReply] = {}
    for reply in trace_here(requests):
        if not last:
            (planner,) = (each for each in psutil.Process().children() if "octet.worker.planning" in each.cmdline())
            planner.kill()
        assert reply.id not in last or reply.peak is not None, "a peak that was known is kept"
        last[reply.id] = reply
    assert last.keys() == {request.id for request in requests}
    assert not any(reply.more for reply in last.values())
    assert any(reply.peak is not None for reply in last.values())
    assert any(f"ended with status -{signal.SIGKILL}" in (reply.reason or "") for reply in last.values())


@pytest.mark.system
@pytest.mark.slow
def test_children_end_with_the_process_and_keep_no_reader_waiting() -> None:
    """The children are stopped, as by a trace that hangs: only a kill ends them."""
    with tracing("hangs") as (process, _, stdout, children):
        os.kill(process.pid, signal.SIGSTOP)  # no more children
        numbers = [int(number) for number in children.read_text().split()]
        wait_until(lambda: {os.path.realpath(f"/proc/{number}/fd/1") for number in numbers} == {os.devnull})
        for number in numbers:
            os.kill(number, signal.SIGSTOP)
        process.kill()
        try:
            wait_until(lambda: not any(_runs(number) for number in numbers))
            assert stdout.read() == ""
        finally:
            for number in filter(_runs, numbers):
                os.kill(number, signal.SIGKILL)


def _runs(process_id: int) -> bool:
    """Return True for a process that has not ended; one that no parent has waited for yet has."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False

"""A real job through the whole path: REST, database, dispatcher, Ray, a PyTorch process, and the results back."""

import ipaddress
import json
import os
import re
import stat
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from octet.api_schemas import JobState
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.client import ApiError
from octet.worker.models import build_model
from tests.e2e.octet_server import Server, losses
from tests.kit.chat import VOCAB_SIZE, save_tokenizer, write_chats
from tests.kit.training import train
from tests.kit.waiting import LONG_S

ROOT = Path(__file__).parent.parent.parent
LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.slow
def test_a_job_runs_and_everything_about_it_comes_back(server: Server, spec_document: dict[str, Any]) -> None:
    spec_document["training"] |= {"steps": 6, "eval_every": 3, "checkpoint_every": 2}
    earlier = len(server.spec_validations())
    job_id = server.client.submit(spec_document).id
    # Events say that it is over; reading the job itself would parse its spec once more.
    server.wait_for(lambda: any(event.type in {"job.succeeded", "job.failed"} for event in server.client.events(job_id)))
    check_that_the_spec_was_parsed_at_most_four_times(server, server.spec_validations()[earlier:])
    job = server.client.job(job_id)
    assert job.state is JobState.SUCCEEDED, job
    assert job.summary is not None
    assert [step for step, _, _ in losses(server, job)] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _, evaluation in losses(server, job) if evaluation is not None] == [3, 6]
    assert [checkpoint.step for checkpoint in server.client.checkpoints(job.id)] == [2, 4, 6]
    assert [event.seq for event in server.client.events(job.id)] == list(range(1, 1 + len(list(server.client.events(job.id)))))
    messages = [line.message for line in server.client.logs(job.id)]
    assert any(message.startswith("model: ") for message in messages)
    assert any(message.startswith("step 1: loss ") for message in messages)
    assert job.trace_id is not None
    assert any(message.startswith(f"traceparent: 00-{job.trace_id}-") for message in messages)
    assert messages[-1].startswith("finished 6 steps: training loss ")
    assert job.start is not None
    *moments, warmed_up_at = job.start.model_dump().values()
    assert warmed_up_at is None  # nothing is compiled on a CPU
    assert all(earlier <= later for earlier, later in pairwise(moments))
    assert job.summary.memory_bytes["weights"] == 4 * job.summary.num_parameters
    measured = server.client.measurements(job_id)
    assert measured.memory is not None
    assert measured.memory.held == job.summary.memory_bytes
    assert measured.num_parameters == job.summary.num_parameters
    curve = server.client.curve(job_id)
    assert (curve.step, curve.evaluations.step) == ((1, 2, 3, 4, 5, 6), (3, 6))
    assert not re.search(r"/(numpy|pandas|pyarrow|torch|transformers)/", Path(f"/proc/{server.pid}/maps").read_text())


def check_that_the_spec_was_parsed_at_most_four_times(server: Server, parsed_by: list[int]) -> None:
    """`parsed_by` has the id of the process for each time that a JobSpec was parsed between the request and the rank's end."""
    times_by_process = Counter(parsed_by)
    assert times_by_process.pop(server.pid) == 3, "the request, the launch, and the end, which is compared with the plan"
    assert list(times_by_process.values()) == [1], "the rank; its supervisor passes the order on unread"


# test_one_post_fine_tunes_a_model_on_two_ranks does the same with plain gradients.
@pytest.mark.system
@pytest.mark.parametrize("level", ["O2", pytest.param("bf16-amp", marks=pytest.mark.matrix)])
def test_two_ranks_train_what_one_rank_trains(server: Server, spec_document: dict[str, Any], level: str) -> None:
    spec_document["precision"] = {"level": level}
    alone = server.client.submit(spec_document)
    together = server.client.submit(spec_document | {"resources": {"pool": "cpu", "workers": 2}})
    curves = []
    for job in (alone, together):
        finished = server.finish(job.id)
        assert finished.state is JobState.SUCCEEDED, finished
        curves.append([loss for _, loss, _ in losses(server, finished)])
    # The first loss is of the same weights and data; later ones differ by the rounding of the averaged gradients.
    assert curves[0] == pytest.approx(curves[1], rel=2e-3)


@pytest.mark.system
def test_one_post_fine_tunes_a_model_on_two_ranks(server: Server, tmp_path: Path) -> None:
    """The job trains what one rank trains in this process: a step's mean is over all completions, however they are divided."""
    network = build_model(HuggingFaceSpec(architecture="llama", config=LLAMA), seed=3).network
    network.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    training = {"epochs": 1, "global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 48}
    document = {
        "name": "fine-tuning",
        "model": {"path": str(tmp_path / "model")},
        "precision": {"level": "fp32"},
        "data": {"source": "jsonl", "path": str(write_chats(tmp_path / "chats.jsonl", 24))},
        "training": training,
    }
    recorder, summary = train(document, tmp_path / "here")
    job = server.finish(server.client.submit(document | {"resources": {"pool": "cpu", "workers": 2}}).id)
    assert job.state is JobState.SUCCEEDED, job
    assert job.summary is not None
    assert job.progress is not None
    assert job.progress.steps == job.summary.steps == summary.steps == 3
    curve = list(server.client.metrics(job.id))
    assert [point.loss for point in curve] == pytest.approx(recorder.losses(), rel=1e-4)
    assert set(curve[-1].evaluation_metrics) == {"token_accuracy"}
    assert curve[-1].evaluation_metrics == pytest.approx(summary.evaluation_metrics, abs=0.05)


@pytest.mark.system
def test_two_ranks_listen_and_write_for_us_alone_until_they_are_cancelled(server: Server, long_job: dict[str, Any]) -> None:
    """Nobody else reaches a server on loopback: not through its sockets, not through its files, whatever the caller's umask."""
    long_job["training"] |= {"steps": 100_000, "checkpoint_every": 5}
    job = server.client.submit(long_job | {"resources": {"pool": "cpu", "workers": 2}})
    server.wait_for(lambda: len(list(server.client.checkpoints(job.id))) > 0)
    try:
        assert len(server.ranks()) == 2
        assert open_sockets(server) == []
        assert open_paths(server.data_dir) == []
        temp_dir = Path(json.loads((server.data_dir / "ray" / "cluster.json").read_text())["temp_dir"])
        assert stat.S_IMODE(temp_dir.parent.stat().st_mode) == 0o700, "Ray's folder is open to all; the one around it is not"
    finally:
        server.client.cancel(job.id)  # or the tests that share the server would wait for its slots
    assert server.finish(job.id).state is JobState.CANCELLED


def open_sockets(server: Server) -> list[str]:
    """Name every listening socket that another machine can reach, with its process."""
    found, names = [], set()
    for process in [*server.processes(), psutil.Process(server.pid)]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                ip, port = connection.laddr
                names.add(process.name())
                found += [] if is_loopback(ip) else [f"{process.name()} {' '.join(process.cmdline())[:160]}: {ip}:{port}"]
    assert {"gcs_server", "raylet"} < names, "they listen, and so do the ranks"
    assert any("RankActor" in name for name in names), names
    return found


def is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def open_paths(folder: Path) -> list[str]:
    """Name every path of the data folder that has a mode for other users. Checkpoints come and go meanwhile."""
    modes: dict[Path, int] = {folder: stat.S_IMODE(folder.stat().st_mode)}
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            with suppress(FileNotFoundError):
                status = path.lstat()
                if not stat.S_ISLNK(status.st_mode):
                    modes[path] = stat.S_IMODE(status.st_mode)
    assert any(path.name == "tensors.safetensors" for path in modes)
    assert any(path.name == "octet.db-wal" for path in modes)
    return [f"{path.relative_to(folder)} {mode:04o}" for path, mode in modes.items() if mode & 0o077]


@pytest.mark.system
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"precision": {"level": "02"}}, "precision.level"),
        (
            {"model": {"hidden_size": 32, "num_layers": 1, "num_heads": 5, "vocab_size": 256, "max_sequence_length": 64}},
            "model.num_heads",
        ),
        ({"data": {"source": "text", "path": "/no/such/folder"}}, "data.path"),
        ({"resources": {"pool": "cpu", "workers": 4096}}, "resources.workers"),
        ({"resources": {"pool": "h100"}}, "resources.pool"),
    ],
)
def test_a_bad_spec_is_refused_at_submission(
    server: Server, spec_document: dict[str, Any], change: dict[str, Any], field: str
) -> None:
    if field == "resources.workers":
        spec_document["training"]["global_batch_size"] = 4096
    with pytest.raises(ApiError) as caught:
        server.client.submit(spec_document | change)
    assert caught.value.problem.status == 422
    assert [violation.field for violation in caught.value.problem.errors] == [field]
    (violation,) = caught.value.problem.errors
    assert violation.got
    assert violation.allowed
    assert violation.message


@pytest.mark.system
def test_another_address_than_loopback_needs_a_key(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "octet.client.cli",
        "serve",
        "--host",
        "0.0.0.0",
        "--port",
        "8765",
        "--data-dir",
        str(tmp_path),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG_S, cwd=ROOT)
    assert result.returncode == 2
    assert "key" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.system
def test_the_same_spec_under_torchrun_has_the_losses_of_the_service(
    server: Server, tmp_path: Path, spec_document: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {"resources": {"workers": 2}, "precision": {"level": "O2"}, "parallelism": {"zero_stage": 1}}
    spec = spec_document | changes
    (tmp_path / "job.json").write_text(json.dumps(spec))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "octet.worker",
    ]
    command += [str(tmp_path / "job.json"), "--job-dir", str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG_S, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    logged = [(int(step), float(loss)) for step, loss in re.findall(r" step step=(\d+) loss=(\S+) ", result.stderr)]
    job = server.finish(server.client.submit(spec).id)
    assert job.state is JobState.SUCCEEDED, job
    assert job.summary is not None
    assert logged == [(step, loss) for step, loss, _ in losses(server, job)]
    assert len(logged) == summary["steps"] == 4
    assert summary["evaluation_loss"] == job.summary.evaluation_loss

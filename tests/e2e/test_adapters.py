"""A job with adapters through the service: a packed, frozen model in FP8, on two ranks, exported for peft."""

from pathlib import Path

import pytest
import torch

from octet.api_schemas import JobState
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.worker.models import build_model
from octet.worker.pretrained.__main__ import main as export
from tests.e2e.octet_server import Server
from tests.e2e.test_job import LLAMA
from tests.kit.chat import save_tokenizer, write_chats
from tests.kit.training import train

pytestmark = pytest.mark.system


@pytest.mark.filterwarnings("ignore")  # peft's and transformers' own
def test_one_post_trains_adapters_on_two_ranks(server: Server, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    network = build_model(HuggingFaceSpec(architecture="llama", config=LLAMA), seed=3).network
    network.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    document = {
        "name": "adapters",
        "model": {"path": str(tmp_path / "model")},
        "adapter": {"rank": 4, "alpha": 8, "targets": ["q_proj", "*.mlp.*"]},
        "precision": {"level": "fp32"},
        "data": {"source": "jsonl", "path": str(write_chats(tmp_path / "chats.jsonl", 24)), "packing": True},
        "training": {
            "steps": 4,
            "global_batch_size": 4,
            "micro_batch_size": 1,
            "sequence_length": 64,
            "optimizer": {"learning_rate": 1e-2},
        },
    }
    recorder, _ = train(document, tmp_path / "here")
    submitted = server.client.submit(document | {"resources": {"pool": "cpu", "workers": 2}})
    in_fp8 = server.client.submit(document | {"precision": {"level": "O3"}})
    job, fp8_job = server.finish(submitted.id), server.finish(in_fp8.id)
    assert job.state is fp8_job.state is JobState.SUCCEEDED, (job, fp8_job)
    assert [point.loss for point in server.client.metrics(job.id)] == pytest.approx(recorder.losses(), rel=1e-4)
    assert job.summary is not None
    assert fp8_job.summary is not None
    assert fp8_job.summary.memory_bytes["weights"] < 0.5 * job.summary.memory_bytes["weights"]
    assert fp8_job.summary.evaluation_loss == pytest.approx(job.summary.evaluation_loss, rel=0.05)

    [checkpoint] = server.client.checkpoints(fp8_job.id)
    server.client.download(checkpoint, tmp_path / "checkpoint")
    assert export([str(tmp_path / "checkpoint"), "--out", str(tmp_path / "adapter")]) == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        before = base(torch.arange(48)[None]).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(torch.arange(48)[None]).logits
    assert float((adapted - before).abs().max()) > 1e-3

"""A job's exports: stock transformers loads them, their card is true, and a kill leaves one of each."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

from octet.api_schemas import ANY_FILE, CheckpointRef, EventReport, ExportReport, Files, JobSpec
from octet.api_schemas.data.stores import StoreAccess
from octet.api_schemas.export import EXPORT_PROGRESS
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.worker.checkpoint import load_folder
from octet.worker.common.config import RankEnv, resolve
from octet.worker.common.errors import Cancelled, Fenced, InvalidConfig
from octet.worker.data import open_source
from octet.worker.data.tokens import write_shards
from octet.worker.fp8.linear import Float8Linear
from octet.worker.mesh import Mesh
from octet.worker.models import build_model
from octet.worker.pretrained import job_export
from octet.worker.pretrained.from_checkpoint import adapted, trained
from octet.worker.train.loop import Trainer
from tests.kit.chat import VOCAB_SIZE, save_tokenizer
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.text import text
from tests.kit.training import Recorder, train, with_training

SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": VOCAB_SIZE}
LLAMA = {
    "family": "llama",
    "num_layers": 2,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "max_sequence_length": 64,
    **SIZES,
}
QWEN3: dict[str, Any] = {
    "family": "huggingface",
    "architecture": "qwen3",
    "config": {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        **SIZES,
    },
}
MIXTURE = {
    "family": "huggingface",
    "architecture": "qwen3_moe",
    "config": QWEN3["config"]
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1},
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tokens = save_tokenizer(folder / "tokenizer")(text(300))["input_ids"]
    write_shards(folder / "shards", VOCAB_SIZE, [tokens[:-1000]], [tokens[-1000:]])
    return folder / "shards"


@pytest.fixture
def document(shards: Path) -> dict[str, Any]:
    training = {"steps": 4, "global_batch_size": 4, "sequence_length": 32, "eval_every": 2, "checkpoint_every": 2}
    return {
        "name": "exported",
        "model": LLAMA,
        "data": {"source": "tokens", "path": str(shards)},
        "training": training | {"eval_batches": 2, "optimizer": {"learning_rate": 1e-2}},
        "export": {"format": "fp8"},
    }


def at_level(document: dict[str, Any], level: str, **export: Any) -> dict[str, Any]:
    return with_training(document, level) | {"export": {"format": "fp8"} | export}


def their_logits(folder: Path, document: dict[str, Any]) -> torch.Tensor:
    """The logits of stock transformers, with compressed-tensors, on the samples that the card is of."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(batch["tokens"]).logits[0] for batch in held_out(document)])


def held_out(document: dict[str, Any]) -> list[Any]:
    spec = JobSpec.model_validate(document)
    source = open_source(spec.data, spec.training.sequence_length, seed=0)
    number = spec.training.eval_batches * spec.training.global_batch_size
    return list(source.evaluation_batches(1, number, 0, 1))


def trained_model(job_dir: Path, step: int) -> torch.nn.Module:
    return trained(load_folder(job_dir / "checkpoints" / f"step_{step:010}")).eval()


@pytest.mark.parametrize(
    ("model", "level", "activations"),
    [
        (LLAMA, "O3", "none"),
        pytest.param(QWEN3, "O2", "dynamic", marks=pytest.mark.system),
        (LLAMA, "O3-split", "static"),
        # transformers multiplies experts in 16 bits whatever `activations` says
        pytest.param(MIXTURE, "O3", "none", marks=pytest.mark.system),
        *(
            pytest.param(model, level, activations, marks=pytest.mark.matrix)
            for model, level, activations in (
                (QWEN3, "O3", "dynamic"),
                (QWEN3, "te", "static"),
                (LLAMA, "O2", "none"),
                (QWEN3, "te", "none"),
            )
        ),
    ],
    ids=[
        "llama-O3",
        "qwen3-O2-dynamic",
        "llama-O3-split-static",
        "qwen3_moe-O3",
        "qwen3-O3-dynamic",
        "qwen3-te-static",
        "llama-O2",
        "qwen3-te",
    ],
)
def test_transformers_computes_what_the_card_says(
    document: dict[str, Any], model: dict[str, Any], level: str, activations: str, tmp_path: Path
) -> None:
    document = at_level(document, level, activations=activations) | {"model": model}
    recorder, summary = train(document, tmp_path)
    [report] = recorder.of(ExportReport)
    card = report.mismatch
    assert (report.name, summary.mismatch) == (f"step_0000000004_fp8{'' if activations == 'none' else f'-{activations}'}", card)
    folder = tmp_path / "exports" / report.name
    ours = trained_model(tmp_path, 4)
    with torch.no_grad():
        expected = torch.cat([ours(batch["tokens"])[0] for batch in held_out(document)]).double()
    found = their_logits(folder, document).double()
    log_p, log_q = expected.log_softmax(-1), found.log_softmax(-1)
    kl_divergence = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    assert card.num_tokens == len(found) == 2 * 4 * 32
    # Of nearly equal logits, fp32 leaves a few units in the eighth place.
    assert card.evaluation.kl_divergence == pytest.approx(kl_divergence, rel=0.001, abs=1e-7)
    assert card.evaluation.largest_logit_difference == pytest.approx(float((expected - found).abs().max()), rel=0.005)
    agreement = float((expected.argmax(-1) == found.argmax(-1)).double().mean())
    assert card.evaluation.top1_agreement == pytest.approx(agreement, abs=0.01)
    assert 0 < card.evaluation.kl_divergence < 0.01
    assert (card.weights.kl_divergence == 0) == level.startswith("O3")
    assert f"{card.evaluation.kl_divergence:.3g}" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    "export", [{}, {"activations": "dynamic"}, {"layout": "hf-fp8-block", "activations": "dynamic"}], ids=str
)
def test_codes_of_o3_are_written_byte_for_byte(document: dict[str, Any], export: dict[str, Any], tmp_path: Path) -> None:
    recorder, _ = train(at_level(document, "O3", **export), tmp_path)
    [report] = recorder.of(ExportReport)
    weights = report.mismatch.weights
    assert (weights.kl_divergence, weights.top1_agreement, weights.largest_logit_difference) == (0.0, 1.0, 0.0)
    model, folder = trained_model(tmp_path, 4), tmp_path / "exports" / report.name
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        for ours, theirs in (("attention.query", "self_attn.q_proj"), ("mlp.down", "mlp.down_proj")):
            layer = model.get_submodule(f"blocks.1.{ours}")
            assert isinstance(layer, Float8Linear)
            codes = file.get_tensor(f"model.layers.1.{theirs}.weight")
            assert torch.equal(codes.view(torch.uint8), layer.weight.codes.view(torch.uint8))
            name = "weight_scale_inv" if "layout" in export else "weight_scale"
            scale = file.get_tensor(f"model.layers.1.{theirs}.{name}")
            assert torch.equal(scale, layer.weight.dequant_scale.expand(scale.shape))
            if "layout" in export:
                assert scale.shape == tuple(-(-size // 128) for size in codes.shape)
    if "layout" in export:
        assert (config["quant_method"], config["weight_block_size"], config["activation_scheme"]) == (
            "fp8",
            [128, 128],
            "dynamic",
        )
    else:
        inputs = config["config_groups"]["group_0"]["input_activations"]
        assert (inputs is not None and inputs["dynamic"]) == bool(export)


@pytest.mark.system
def test_each_checkpoint_and_the_best_one(document: dict[str, Any], tmp_path: Path) -> None:
    recorder, _ = train(at_level(document, "O2", when="every_checkpoint"), tmp_path / "every")
    assert [report.step for report in recorder.of(ExportReport)] == [2, 4]
    rates = {"optimizer": {"learning_rate": 0.1}, "schedule": {"warmup_steps": 3}}
    diverging = with_training(at_level(document, "O2", when="best"), "O2", **rates)
    recorder, _ = train(diverging, tmp_path / "best")
    losses = {report.step: report.loss for report in recorder.reports if report.kind == "evaluation"}
    assert losses[2] < losses[4], "the test is of a run that gets worse"
    assert [report.step for report in recorder.of(ExportReport)] == [2]


@pytest.mark.system
def test_training_does_not_change(document: dict[str, Any], tmp_path: Path) -> None:
    """An export builds networks and evaluates in between; the losses are those of a run without, bit for bit."""
    with_exports, _ = train(at_level(document, "O3", when="every_checkpoint"), tmp_path / "with")
    without, _ = train(at_level(document, "O3") | {"export": None}, tmp_path / "without")
    assert with_exports.losses() == without.losses()


def test_a_kill_between_write_and_report_leaves_one_export(
    document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    class Dying(Recorder):
        def send(self, body: Any, at: object = None) -> None:
            if isinstance(body, ExportReport):
                raise Killed
            super().send(body)

    document, dying = at_level(document, "O3"), Dying()
    with pytest.raises(Killed):
        train(document, tmp_path, recorder=dying)
    [folder] = (tmp_path / "exports").iterdir()
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    monkeypatch.setattr(job_export, "export", lambda *_, **__: pytest.fail("it was written again"))
    recorder, summary = train(document, tmp_path, dying.checkpoints())
    [report] = recorder.of(ExportReport)
    assert (report.name, summary.mismatch) == (folder.name, report.mismatch)
    assert list((tmp_path / "exports").iterdir()) == [folder]
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


@pytest.mark.system
def test_a_stopped_run_exports_its_checkpoint_when_it_resumes(document: dict[str, Any], tmp_path: Path) -> None:
    """And what an attempt left half-written is gone."""
    document = at_level(document, "O2", when="every_checkpoint")
    stopped = Recorder(stop_after_step=3, stop=lambda why: Cancelled(why, saves=True))
    with pytest.raises(Cancelled):
        train(document, tmp_path, recorder=stopped)
    half = tmp_path / "exports" / ".unfinished_step_0000000003_fp8"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    recorder, _ = train(document, tmp_path, stopped.checkpoints())
    assert [report.step for report in recorder.of(ExportReport)] == [2, 3, 4]
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == [f"step_000000000{step}_fp8" for step in (2, 3, 4)]


def test_an_attempt_that_another_has_replaced_writes_no_export(document: dict[str, Any], tmp_path: Path) -> None:
    """The order arrives while it compares what it has written."""
    fenced = Recorder(stop_after_step=7, stop=Fenced)
    with pytest.raises(Fenced):
        train(at_level(document, "O3"), tmp_path, recorder=fenced)
    assert len(fenced.losses()) == 4
    assert (fenced.of(ExportReport), list((tmp_path / "exports").iterdir())) == ([], [])


def test_a_pause_ends_an_export_after_the_last_step(document: dict[str, Any], tmp_path: Path) -> None:
    """Nothing is left to save, so slots are not held until it is written; the next attempt makes it."""
    paused = Recorder(stop_after_step=7, stop=lambda why: Cancelled(why, saves=True))
    with pytest.raises(Cancelled):
        train(at_level(document, "O3"), tmp_path, recorder=paused)
    assert len(paused.losses()) == 4
    assert (paused.of(ExportReport), list((tmp_path / "exports").iterdir())) == ([], [])
    recorder, _ = train(at_level(document, "O3"), tmp_path, paused.checkpoints())
    assert (recorder.losses(), [report.step for report in recorder.of(ExportReport)]) == ([], [4])


def test_an_export_that_takes_long_says_that_it_goes_on(
    document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends an attempt without progress after its stall timeout."""
    monkeypatch.setattr(job_export, "PROGRESS_EVERY_S", 0.0)
    recorder, _ = train(at_level(document, "O3"), tmp_path)
    said = [event.message for event in recorder.of(EventReport) if event.type == EXPORT_PROGRESS]
    assert said[:2] == ["exporting step 4: its checkpoint is read", "exporting step 4: its files are written"]
    assert said[2:] == [f"exporting step 4: {number} held-out samples are compared" for number in range(8)]


def test_an_export_that_is_too_far_is_not_kept_and_the_job_succeeds(document: dict[str, Any], tmp_path: Path) -> None:
    recorder, summary = train(at_level(document, "O3", max_kl_divergence=1e-9), tmp_path)
    [event] = [event for event in recorder.of(EventReport) if event.type == "export.failed"]
    assert "allowed: at most 1e-09, export.max_kl_divergence" in event.message
    assert (recorder.of(ExportReport), summary.steps, summary.mismatch) == ([], 4, None)
    assert list((tmp_path / "exports").iterdir()) == []


@pytest.mark.parametrize(
    ("export", "sizes", "message"),
    [
        ({}, {"architecture": "gpt2", "config": {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 64}}, "Conv1D"),
        (
            {"layout": "hf-fp8-block", "activations": "dynamic"},
            QWEN3 | {"config": {**QWEN3["config"], "intermediate_size": 192}},
            "down_proj has 192 inputs; .* multiples of 128",
        ),
    ],
    ids=["Conv1D", "192 inputs"],
)
def test_what_cannot_be_written_is_refused_before_the_first_step(
    document: dict[str, Any], export: dict[str, Any], sizes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = {**sizes, "family": "huggingface", "config": {**sizes["config"], "vocab_size": VOCAB_SIZE}}
    recorder = Recorder()
    with pytest.raises(InvalidConfig, match=f"export: .*{message}"):
        train(at_level(document, "O2", **export) | {"model": model}, tmp_path, recorder=recorder)
    assert recorder.losses() == []


@pytest.mark.system
def test_what_the_base_has_besides_weights_goes_with_it(document: dict[str, Any], tmp_path: Path) -> None:
    """Fine-tuned whole, as adapters, and merged."""
    recorder, _ = train(at_level(document, "O2", format="fp32"), tmp_path / "base")
    base = tmp_path / "base" / "exports" / recorder.of(ExportReport)[0].name
    save_tokenizer(base)
    (base / "generation_config.json").write_text('{"temperature": 0.5}')
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\nA card.\n")
    document = document | {"model": {"path": str(base)}}
    whole, _ = train(at_level(document, "O3"), tmp_path / "whole")
    adapted = document | {"adapter": {"rank": 4, "targets": ["q_proj"]}, "precision": {"level": "O3"}}
    adapters, _ = train(adapted | {"export": {"format": "bf16"}}, tmp_path / "adapters")
    merged, _ = train(adapted | {"export": {"format": "bf16", "merge": True}}, tmp_path / "merged")
    for name, found in (("whole", whole), ("adapters", adapters), ("merged", merged)):
        [report] = found.of(ExportReport)
        folder = tmp_path / name / "exports" / report.name
        assert report.mismatch is not None
        assert json.loads((folder / "generation_config.json").read_text()) == {"temperature": 0.5}
        assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
        card = (folder / "README.md").read_text()
        assert "license: apache-2.0" in card
        assert f"It began from {base.name}" in card
        assert f"{report.mismatch.evaluation.kl_divergence:.3g}" in card
        assert (folder / "adapter_model.safetensors").exists() == (name == "adapters")
        head = yaml.safe_load(card.split("---\n")[1])
        assert head["library_name"] == ("peft" if name == "adapters" else "transformers")
        assert head.get("base_model") == (base.name if name == "adapters" else None)
        assert ("LoRA of rank 4" in card, "are merged into the weights" in card) == (name != "whole", name == "merged")


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")  # peft's
@pytest.mark.parametrize("merge", [False, True], ids=["adapters", "merged"])
def test_the_card_of_adapters_is_that_of_peft_and_of_what_is_merged(
    document: dict[str, Any], merge: bool, tmp_path: Path
) -> None:
    """The trainer evaluates codes with adapters; a server has the folder's weights in bf16 with them, or their sums in bf16."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    spec = HuggingFaceSpec(architecture="llama", config=QWEN3["config"])
    build_model(spec, seed=3).network.to(torch.bfloat16).save_pretrained(base)
    document = at_level(document, "O3", format="fp32" if merge else "bf16", merge=merge) | {"model": {"path": str(base)}}
    document["adapter"] = {"rank": 4, "targets": ["*_proj"]}
    recorder, summary = train(document, tmp_path / "job")
    [report] = recorder.of(ExportReport)
    folder = tmp_path / "job" / "exports" / report.name
    state = load_folder(tmp_path / "job" / "checkpoints" / "step_0000000004")
    ours = adapted(state).eval()
    with torch.no_grad():
        expected = torch.cat([ours(batch["tokens"])[0] for batch in held_out(document)]).double()
        if merge:
            found = their_logits(folder, document).double()
        else:
            theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder).eval()
            found = torch.cat([theirs(batch["tokens"]).logits[0] for batch in held_out(document)]).double()
    targets = torch.cat([batch["targets"][0] for batch in held_out(document)])
    loss = float(torch.nn.functional.cross_entropy(expected, targets))
    assert loss == pytest.approx(summary.evaluation_loss, rel=1e-5)
    log_p, log_q = expected.log_softmax(-1), found.log_softmax(-1)
    kl_divergence = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    card = report.mismatch
    assert card.evaluation.kl_divergence == pytest.approx(kl_divergence, rel=0.001, abs=1e-7)
    assert 0 < card.weights.kl_divergence < 0.01  # codes have fewer bits than the folder's weights


def files_with(*targets: str) -> Files:
    return replace(ANY_FILE, stores=StoreAccess(export_prefixes=targets))


def test_an_export_is_sent_to_a_store_and_has_its_address(document: dict[str, Any], tmp_path: Path) -> None:
    target = f"file://{tmp_path}/store/models"
    document = at_level(document, "O3", target=target, compared_tokens=0)
    recorder, _ = train(document, tmp_path / "job", files=files_with(f"file://{tmp_path}/store"))
    [report] = recorder.of(ExportReport)
    assert report.address == f"{target}/job/{report.name}"
    here, there = tmp_path / "job" / "exports" / report.name, Path(report.address.removeprefix("file://"))
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (here, there)]
    assert contents[0] == contents[1]
    assert hashlib.sha256(contents[1]["manifest.json"]).hexdigest() == report.sha256


def test_an_export_that_cannot_be_sent_is_not_registered_and_the_job_succeeds(document: dict[str, Any], tmp_path: Path) -> None:
    """The next attempt finds what was written here, and sends it."""
    document = at_level(document, "O3", target=f"file://{tmp_path}/store", compared_tokens=0)
    (tmp_path / "store" / "job" / "step_0000000004_fp8" / "model.safetensors").mkdir(parents=True)
    files = files_with(f"file://{tmp_path}/store")
    recorder, summary = train(document, tmp_path / "job", files=files)
    [event] = [event for event in recorder.of(EventReport) if event.type == "export.failed"]
    assert "the checkpoint of step 4 was not exported" in event.message
    assert "model.safetensors" in event.message
    assert (recorder.of(ExportReport), summary.steps) == ([], 4)
    [folder] = (tmp_path / "store" / "job").iterdir()
    assert not (folder / "manifest.json").exists()
    shutil.rmtree(folder)
    recorder, _ = train(document, tmp_path / "job", recorder.checkpoints(), files=files)
    assert [report.address for report in recorder.of(ExportReport)] == [f"file://{folder}"]


def test_a_target_that_no_rank_can_write_to_is_refused_before_the_first_step(document: dict[str, Any], tmp_path: Path) -> None:
    for target, says in (("nowhere://models", "cannot write nowhere://"), ("s3://others", "a place below nowhere://models")):
        recorder = Recorder()
        with pytest.raises(InvalidConfig, match=says):
            train(at_level(document, "O3", target=target), tmp_path, recorder=recorder, files=files_with("nowhere://models"))
        assert recorder.losses() == []


def test_data_roots_close_what_lies_outside(document: dict[str, Any], tmp_path: Path) -> None:
    """A link in the base's folder does not bring a file of the server into the export."""
    recorder, _ = train(at_level(document, "O2", format="fp32"), tmp_path / "base")
    inside = tmp_path / "roots" / "model"
    shutil.copytree(tmp_path / "base" / "exports" / recorder.of(ExportReport)[0].name, inside)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (inside / "generation_config.json").symlink_to(secret)
    spec = JobSpec.model_validate(at_level(document, "O2") | {"model": {"path": str(inside)}})
    files = Files.below((tmp_path / "roots", Path(document["data"]["path"])))
    config, recorder = resolve(spec, RankEnv(), files), Recorder()
    with Mesh(config.env, torch.device("cpu")) as mesh:
        Trainer(config, mesh, recorder, tmp_path / "job").run()
    [event] = [event for event in recorder.of(EventReport) if event.type == "export.failed"]
    assert "data roots" in event.message
    assert list((tmp_path / "job" / "exports").iterdir()) == []


def run_rank(rank: int, document: dict[str, Any], job_dir: str, port: int) -> None:
    torch.set_num_threads(1)
    spec = JobSpec.model_validate(document)
    config, recorder = resolve(spec, RankEnv(rank, 2, rank, master_port=port)), Recorder()
    with Mesh(config.env, torch.device("cpu"), config.layout) as mesh:
        summary = Trainer(config, mesh, recorder, Path(job_dir)).run()
    if rank == 0:
        [report] = recorder.of(ExportReport)
        assert summary.mismatch == report.mismatch
        found = [report.model_dump(mode="json"), [ref.model_dump() for ref in recorder.checkpoints()]]
        (Path(job_dir) / "found.json").write_text(json.dumps(found))
    else:
        assert recorder.of(ExportReport) == []


def run_refused_rank(rank: int, document: dict[str, Any], port: int) -> None:
    torch.set_num_threads(1)
    config = resolve(JobSpec.model_validate(document), RankEnv(rank, 2, rank, master_port=port))
    with (
        Mesh(config.env, torch.device("cpu"), config.layout) as mesh,
        pytest.raises(InvalidConfig, match=r"mlp.down has 192 inputs; .* multiples of 128"),
    ):
        Trainer(config, mesh, Recorder(), Path("unused"))


@pytest.mark.system
@pytest.mark.parametrize("parallelism", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_ranks_that_divide_a_model_refuse_what_it_cannot_be_written_as(
    document: dict[str, Any], parallelism: dict[str, Any]
) -> None:
    """Before the first step, not in an event after the last one."""
    document = with_training(document, "O3", micro_batch_size=2) | {"model": LLAMA | {"intermediate_size": 192}}
    document["export"] = {"format": "fp8", "layout": "hf-fp8-block", "activations": "dynamic"}
    two = document | {"parallelism": parallelism, "resources": {"workers": 2}}
    run_ranks(run_refused_rank, (two, free_port()), 2)


@pytest.mark.system
@pytest.mark.parametrize("parallelism", [{"zero_stage": 3}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_two_ranks_write_the_files_of_one(document: dict[str, Any], parallelism: dict[str, Any], tmp_path: Path) -> None:
    """One rank goes on from the checkpoint of two, takes no step, and exports: the same files, and the same card."""
    document = with_training(at_level(document, "O3"), "O3", micro_batch_size=2)
    two = document | {"parallelism": parallelism, "resources": {"workers": 2}}
    run_ranks(run_rank, (two, str(tmp_path / "two"), free_port()), 2)
    report, refs = json.loads((tmp_path / "two" / "found.json").read_text())
    shutil.copytree(tmp_path / "two" / "checkpoints", tmp_path / "one" / "checkpoints")
    recorder, _ = train(document, tmp_path / "one", tuple(CheckpointRef(**ref) for ref in refs))
    [alone] = recorder.of(ExportReport)
    assert recorder.losses() == []
    assert alone.mismatch.model_dump(mode="json") == report["mismatch"]
    assert alone.mismatch.weights.kl_divergence == 0
    folders = [tmp_path / number / "exports" / alone.name for number in ("one", "two")]
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == sorted(path.name for path in folders[1].iterdir())
    for name in {*names} - {"README.md", "manifest.json"}:  # which name the number of ranks, and hashes
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name

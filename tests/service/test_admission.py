"""Admission finds out at submission whatever can be known about a job by then."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octet.api_schemas import Files, JobSpec, SpecConflict, Violation
from octet.api_schemas.data import files, text
from octet.service.errors import EntrypointNotAllowed, InvalidRequest
from octet.service.jobs import admission
from octet.service.settings import Settings
from octet.worker.common.errors import DataError
from octet.worker.data.text import open_source
from tests.kit.tasks import write_tasks

Document = dict[str, Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The one folder that jobs may read."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def violation(root: Path, document: Document, **changes: Any) -> Violation | None:
    """The first violation of the job, or None."""
    limits = changes.pop("limits", {})
    spec = JobSpec.model_validate({**document, **{name: document.get(name, {}) | value for name, value in changes.items()}})
    try:
        admission.check(spec, Settings(data_dir=root.parent / "octet", data_roots=(root,), **limits))
    except InvalidRequest as error:
        (only,) = error.errors
        return only
    return None


def write(folder: Path, sizes: dict[str, int], byte: bytes = b"x") -> Path:
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(byte * size)
    return folder


def test_a_folder_and_a_file_that_will_do(root: Path, spec_document: Document) -> None:
    write(root, {"a.txt": 500, "b/c.txt": 500})
    assert violation(root, spec_document, data={"path": str(root)}) is None
    assert violation(root, spec_document, data={"path": str(root / "a.txt")}) is None


@pytest.mark.parametrize("path", ["/etc/passwd", "/", "/proc/self/environ", "/dev/zero", "/sys", "/no/such"])
def test_what_lies_outside_the_data_roots_is_not_even_looked_at(root: Path, spec_document: Document, path: str) -> None:
    found = violation(root, spec_document, data={"path": path})
    assert found is not None
    assert found.field == "data.path"
    assert str(root) in str(found.allowed)


@pytest.mark.parametrize("path", ["/proc/self/environ", "/dev/zero", "/sys/kernel"])
def test_devices_are_never_read_whatever_the_roots(tmp_path: Path, spec_document: Document, path: str) -> None:
    assert violation(Path("/"), spec_document, data={"path": path}) is not None


def test_links_are_followed_before_the_check(root: Path, spec_document: Document) -> None:
    (root / "out").symlink_to("/etc")
    (root / "loop").symlink_to(root / "loop")
    for name in ("out", "out/passwd", "loop", "../octet", "a/../../octet"):
        found = violation(root, spec_document, data={"path": f"{root}/{name}"})
        assert found is not None, name
        assert found.field == "data.path"


def test_what_is_not_there_or_not_a_file(root: Path, spec_document: Document) -> None:
    os.mkfifo(root / "pipe")
    for name in ("missing", "pipe", "x" * 300):
        found = violation(root, spec_document, data={"path": str(root / name)})
        assert found is not None, name
        assert found.field == "data.path"


def test_a_missing_path_and_one_outside_the_roots_read_differently(root: Path, spec_document: Document) -> None:
    missing = violation(root, spec_document, data={"path": str(root / "missing")})
    outside = violation(root, spec_document, data={"path": "/etc/passwd"})
    outside_and_missing = violation(root, spec_document, data={"path": "/no/such"})
    assert missing is not None
    assert outside is not None
    assert outside_and_missing is not None
    assert "Nothing of that kind is there" in missing.message
    assert "--data-root" not in missing.message
    assert "outside of the server's data roots" in outside.message
    assert "octet serve --data-root" in outside.message
    assert (outside_and_missing.allowed, outside_and_missing.message) == (outside.allowed, outside.message)


def test_a_file_that_cannot_be_read(root: Path, spec_document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, {"a.txt": 500})
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root, who can read everything
    monkeypatch.setattr("octet.service.settings._check_folder", lambda _: None)
    found = violation(root, spec_document, data={"path": str(root / "a.txt")})
    assert found is not None
    assert "permissions" in found.message


@pytest.mark.parametrize(
    "selection",
    [{"include": ["*.py"]}, {"exclude": ["**"]}, {"include": ["a.txt"]}, {"exclude": ["b/**"]}],
)
def test_globs_that_leave_fewer_than_two_files(root: Path, spec_document: Document, selection: Document) -> None:
    write(root, {"a.txt": 500, "b/c.txt": 500})
    found = violation(root, spec_document, data={"path": str(root), **selection})
    assert found is not None
    assert found.field == "data.include"
    assert "of the files" in found.message


def test_binary_hidden_and_linked_files_do_not_count(root: Path, spec_document: Document) -> None:
    write(root, {"a.txt": 500, ".hidden": 500, ".git/b.txt": 500})
    write(root, {"binary": 500}, byte=b"\0")
    (root / "link.txt").symlink_to(root / "a.txt")
    found = violation(root, spec_document, data={"path": str(root)})
    assert found is not None
    assert found.message.startswith("1 of the files")


def test_a_sequence_longer_than_a_part_of_the_text(root: Path, spec_document: Document) -> None:
    write(root, {"a.txt": 33, "b.txt": 33})
    data = {"path": str(root)}
    assert violation(root, spec_document, data=data) is None
    write(root, {"b.txt": 32})
    found = violation(root, spec_document, data=data)
    assert found is not None
    assert (found.field, found.got) == ("training.sequence_length", "32")
    assert "32 bytes" in str(found.allowed)


def test_the_evaluation_part_of_one_file(root: Path, spec_document: Document) -> None:
    write(root, {"a.txt": 321})
    data = {"path": str(root / "a.txt")}
    assert violation(root, spec_document, data=data) is None
    write(root, {"a.txt": 320})
    found = violation(root, spec_document, data=data)
    assert found is not None
    assert "evaluation text" in str(found.allowed)


def test_the_split_is_the_one_that_the_worker_makes(root: Path, spec_document: Document) -> None:
    """Admission refuses a text exactly if the worker would refuse to load it."""
    sizes = {f"file_{number}.txt": 5 + 9 * number for number in range(12)}
    write(root, sizes)
    for length in range(8, 60, 3):
        training = {"sequence_length": length}
        found = violation(root, spec_document, data={"path": str(root)}, training=training)
        data = JobSpec.model_validate(spec_document | {"data": {"path": str(root)}}).data
        with contextlib.nullcontext() if found is None else pytest.raises(DataError):
            open_source(data, length, seed=0)


def test_names_that_are_not_utf8_are_hashed_alike(root: Path, spec_document: Document) -> None:
    for number in range(4):
        Path(os.fsdecode(os.fsencode(root) + b"/part_\xff%d.txt" % number)).write_bytes(b"text " * 100)
    assert violation(root, spec_document, data={"path": str(root)}) is None
    data = JobSpec.model_validate(spec_document | {"data": {"path": str(root)}}).data
    assert open_source(data, 32, seed=0).facts["train_files"] == 3


def test_a_very_large_folder_is_not_walked_to_its_end(
    root: Path, spec_document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root, {f"{number}.txt": 1 for number in range(20)})
    monkeypatch.setattr(text, "MAX_FILES_CHECKED", 10)
    assert violation(root, spec_document, data={"path": str(root)}) is None


def test_an_option_that_would_have_no_effect_is_refused(root: Path, spec_document: Document) -> None:
    write(root, {"a.txt": 4000})
    data = {"path": str(root / "a.txt")}
    found = violation(root, spec_document, data=data, precision={"level": "ao", "torchao": {"fsdp_float8_all_gather": True}})
    assert found is not None
    assert found.field == "precision.torchao.fsdp_float8_all_gather"
    assert violation(root, spec_document, data=data, precision={"level": "ao", "torchao": {"pad_inner_dim": True}}) is None


def test_pools_and_workers(root: Path, spec_document: Document) -> None:
    found = violation(root, spec_document, resources={"pool": "cpuu"})
    assert found is not None
    assert "Did you mean 'cpu'?" in found.message
    found = violation(root, spec_document, resources={"workers": 4096}, training={"global_batch_size": 4096})
    assert found is not None
    assert found.field == "resources.workers"


def test_a_users_own_model_needs_a_pool_that_allows_it(root: Path, spec_document: Document) -> None:
    write(root, {"a.txt": 4000})
    document = spec_document | {"model": {"entrypoint": "never_imported:build"}}
    spec = JobSpec.model_validate(document | {"data": {"source": "text", "path": str(root / "a.txt")}})
    settings = Settings(data_dir=root.parent / "octet", data_roots=(root,))
    with pytest.raises(EntrypointNotAllowed, match="never_imported:build in pool cpu") as refused:
        admission.check(spec, settings)
    assert refused.value.code == "entrypoint_not_allowed"
    pools = tuple(pool.model_copy(update={"allows_entrypoints": True}) for pool in settings.pools)
    admission.check(spec, settings.model_copy(update={"pools": pools}))


def evaluated(root: Path, document: Document, evaluation: Document, *, allows: bool = True) -> Violation | None:
    """The first violation of a job whose exports are evaluated, in a pool that runs code of users."""
    write(root, {"a.txt": 4000})
    document |= {"data": {"source": "text", "path": str(root / "a.txt")}, "export": {"format": "bf16"}}
    settings = Settings(data_dir=root.parent / "octet", data_roots=(root,))
    pools = tuple(pool.model_copy(update={"allows_entrypoints": allows}) for pool in settings.pools)
    try:
        admission.check(
            JobSpec.model_validate(document | {"evaluation": evaluation}), settings.model_copy(update={"pools": pools})
        )
    except InvalidRequest as error:
        (only,) = error.errors
        return only
    return None


def test_tasks_of_an_evaluation_are_looked_for(root: Path, spec_document: Document) -> None:
    folder = write_tasks(root / "tasks")
    (folder / "own.yaml").write_text("task: own\nprocess_docs: !function utils.process\n")
    good = {"path": str(folder), "tasks": ["capitals", "own"]}
    assert evaluated(root, spec_document, good) is None
    found = evaluated(root, spec_document, good | {"tasks": ["capital"]})
    assert found is not None
    assert (found.field, found.got) == ("evaluation.tasks", "capital")
    assert found.allowed == f"tasks in {folder}: capitals, own, texts, words"
    for path, allowed in ((root.parent, "a file or folder inside"), (root / "none", "a file or folder that exists")):
        found = evaluated(root, spec_document, good | {"path": str(path)})
        assert found is not None
        assert found.field == "evaluation.path"
        assert str(found.allowed).startswith(allowed)
    found = evaluated(root, spec_document, good | {"tokenizer": str(folder)})
    assert found is not None
    assert "tokenizer" in f"{found.field} {found.allowed}"


def test_tasks_are_code_of_a_user(root: Path, spec_document: Document) -> None:
    good = {"path": str(write_tasks(root / "tasks")), "tasks": ["capitals"]}
    found = evaluated(root, spec_document, good, allows=False)
    assert found is not None
    assert (found.field, found.got) == ("evaluation.tasks", "tasks, which are code, in pool cpu")


@pytest.mark.parametrize(
    ("limit", "name"), [({"max_entries": 10}, "data_check_max_entries"), ({"timeout_s": 1e-9}, "_timeout_s")]
)
def test_a_folder_beyond_the_limits_is_refused_by_their_name(
    root: Path, spec_document: Document, limit: dict[str, float], name: str
) -> None:
    write(root, {f"{number}/a.txt": 500 for number in range(6)})
    data = {"path": str(root)}
    found = violation(root, spec_document, data=data, limits={f"data_check_{key}": value for key, value in limit.items()})
    assert found is not None
    assert found.field == "data.path"
    assert name in str(found.allowed)
    assert violation(root, spec_document, data=data) is None


def test_globs_that_a_regular_expression_never_finishes(root: Path, spec_document: Document) -> None:
    write(root / Path(*["d"] * 60), {"a.txt": 500, "b.txt": 500})
    found = violation(root, spec_document, data={"path": str(root), "include": ["**/" * 40 + "q", "*a" * 7 + "!"]})
    assert found is not None
    assert found.field == "data.include"


def test_below_the_whole_file_system_some_folders_stay_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A walk that begins above a closed folder does not enter it."""
    write(tmp_path, {"open/a.txt": 1, "closed/b.txt": 1})
    monkeypatch.setattr(files, "NEVER_READ", (str(tmp_path.resolve() / "closed"),))
    everything = Files.below((Path("/"),))
    assert [name for name, _ in everything.list_below(tmp_path, lambda _: True)] == ["open/a.txt"]
    with pytest.raises(SpecConflict, match="never"):
        everything.read(tmp_path / "closed" / "b.txt")


def model_folder(folder: Path, **config: Any) -> dict[str, Any]:
    """Write the configuration of a model, and return the `model` of a job that trains it."""
    folder.mkdir(exist_ok=True)
    document = {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 64} | config
    (folder / "config.json").write_text(json.dumps(document))
    return {"family": "huggingface", "path": str(folder)}


def violation_of_model(root: Path, document: Document, model: dict[str, Any], **changes: Any) -> Violation | None:
    write(root / "text", {"a.txt": 500, "b.txt": 500})
    return violation(root, {**document, "model": {}}, model=model, data={"path": str(root / "text")}, **changes)


def test_a_models_folder_is_checked_as_data_is(root: Path, spec_document: Document) -> None:
    assert violation_of_model(root, spec_document, model_folder(root / "model")) is None
    outside = model_folder(root.parent / "outside")
    (root / "link").symlink_to(root.parent / "outside")
    for path in (outside["path"], str(root / "link"), "/proc/self", str(root / "missing")):
        found = violation_of_model(root, spec_document, {"family": "huggingface", "path": path})
        assert found is not None, path
        assert found.field == "model.path"
    (root / "sneaky").mkdir()
    (root / "sneaky" / "config.json").symlink_to(root.parent / "outside" / "config.json")
    found = violation_of_model(root, spec_document, {"family": "huggingface", "path": str(root / "sneaky")})
    assert found is not None
    assert found.field == "model.path"
    assert str(root) in str(found.allowed)


@pytest.mark.parametrize(
    ("config", "field", "says"),
    [
        ({"model_type": "lama"}, "model.path", "Did you mean 'llama'"),
        ({"model_type": None}, "model.path", "no such architecture"),
        ({"vocab_size": 200}, "model.vocab_size", "Raise model.vocab_size"),
        ({"vocab_size": -1}, "model.path", "vocab_size"),
        ({"max_position_embeddings": 31}, "training.sequence_length", "Shorten"),
        ({"model_type": "bert"}, "model.mask_token", "Set model.mask_token"),
        ({"model_type": "vit", "image_size": 32, "id2label": {"0": "cat"}}, "data.source", "Change data.source"),
    ],
)
def test_a_models_folder_that_does_not_fit_the_job(
    root: Path, spec_document: Document, config: dict[str, Any], field: str, says: str
) -> None:
    found = violation_of_model(root, spec_document, model_folder(root / "model", **config))
    assert found is not None
    assert (found.field, says in found.message) == (field, True), found


def fp8_folder(folder: Path, quantization: Any, tensors: dict[str, tuple[str, list[int]]]) -> dict[str, Any]:
    """Write a folder with quantized weights as far as admission reads it: a configuration, and headers of tensors."""
    model = model_folder(folder, quantization_config=quantization)
    header = json.dumps({name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in tensors.items()}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return model


WEIGHT = "model.layers.0.mlp.up_proj.weight"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FP8 = {
    "model.norm.weight": ("BF16", [160]),
    WEIGHT: ("F8_E4M3", [288, 160]),
    f"{WEIGHT}_scale_inv": ("F32", [3, 2]),
    "model.layers.0.self_attn.k_proj.k_scale": ("F32", [1]),
}


def compressed(group: Any = (), **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"} | dict(group)
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}} | fields


@pytest.mark.parametrize(
    ("quantization", "shape"),
    [
        (BLOCKS, [3, 2]),
        ({"quant_method": "fp8", "activation_scheme": "static"}, []),
        (compressed(), [288, 1]),
        (compressed({"strategy": "tensor"}), [1]),
        (compressed({"strategy": "block", "block_structure": [128, 128]}), [3, 2]),
    ],
)
def test_folders_with_fp8_are_accepted(root: Path, spec_document: Document, quantization: Any, shape: list[int]) -> None:
    model = fp8_folder(root / "model", quantization, FP8 | {f"{WEIGHT}_scale_inv": ("F32", shape)})
    assert violation_of_model(root, spec_document, model) is None


@pytest.mark.parametrize(
    ("quantization", "changes", "got", "allowed"),
    [
        ({"quant_method": "gptq"}, {}, "quantization_config.quant_method 'gptq' in config.json", "fp8 or compressed-tensors"),
        ("fp8", {}, "quantization_config 'fp8'", "an object"),
        (BLOCKS | {"fmt": "e5m2"}, {}, "fmt 'e5m2'", "e4m3"),
        (BLOCKS | {"weight_block_size": [64, 64]}, {}, "weight_block_size [64, 64]", "[128, 128]"),
        (compressed({"type": "int"}), {}, "group_0.weights 'num_bits 8 of type int'", "num_bits 8 of type float"),
        (compressed({"num_bits": 4}), {}, "group_0.weights 'num_bits 4 of type float'", "num_bits 8 of type float"),
        (compressed({"symmetric": False}), {}, "group_0.weights.symmetric False", "true"),
        (compressed({"strategy": "group"}), {}, "group_0.weights.strategy 'group'", "tensor, channel, block"),
        (compressed({"strategy": "block"}), {}, "weights.block_structure None", "[128, 128]"),
        (compressed(config_groups={}), {}, "config_groups {}", "at least one group"),
        (compressed(format="pack-quantized"), {}, "format 'pack-quantized'", "float-quantized"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), {}, "sparsity_config {", "format dense"),
        (compressed(sparsity_config=[1]), {}, "sparsity_config [1]", "format dense"),
        (compressed(transform_config={"R1": {}}), {}, "transform_config", "none"),
        (BLOCKS, {f"{WEIGHT}_scale_inv": None}, f"{WEIGHT} in ", f"{WEIGHT}_scale or {WEIGHT}_scale_inv"),
        (BLOCKS, {f"{WEIGHT}_scale_inv": ("F32", [2, 3])}, "a 288×160 weight, has shape (2, 3)", "(3, 2) (block)"),
        (compressed(), {}, "has shape (3, 2)", "(288, 1) (channel)"),
        (BLOCKS, {f"{WEIGHT}_scale_inv": ("I32", [3, 2])}, f"{WEIGHT}_scale_inv in ", "F32"),
        (BLOCKS, {WEIGHT: ("F8_E4M3", [2, 4, 288, 160])}, "FP8 of shape (2, 4, 288, 160)", "matrices"),
        (BLOCKS, {WEIGHT: ("BF16", [288, 160])}, "a scale without FP8 codes", "F8_E4M3"),
        (BLOCKS, {WEIGHT: ("I8", [288, 160])}, "of dtype I8", "F8_E4M3 with a scale"),
    ],
)  # fmt: skip
def test_folders_that_no_rank_could_read_are_refused(
    root: Path, spec_document: Document, quantization: Any, changes: dict[str, Any], got: str, allowed: str
) -> None:
    tensors = {name: tensor for name, tensor in (FP8 | changes).items() if tensor is not None}
    found = violation_of_model(root, spec_document, fp8_folder(root / "model", quantization, tensors))
    assert found is not None
    assert found.field == "model.path"
    assert got in str(found.got), found
    assert allowed in str(found.allowed), found
    assert found.message


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", b"\xff" * 8, "cannot be read as safetensors"),
        ("model.safetensors", b"\x05" + bytes(7) + b"[[[[[", "cannot be read as safetensors"),
        ("model.safetensors", b"\x29" + bytes(7) + b'{"a": {"dtype": "F32", "shape": [1e999]}}', "cannot be read as"),
        ("model.safetensors", b"", "cannot be read as safetensors"),
        ("model.safetensors.index.json", b"{", "which is no index"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../b.safetensors"}}', "model.safetensors.index.json"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}', "b.safetensors"),
        ("other.txt", b"", "has no safetensors file"),
    ],
)
def test_files_that_hold_no_weights_are_refused(
    root: Path, spec_document: Document, name: str, content: bytes, says: str
) -> None:
    model = model_folder(root / "model", quantization_config=BLOCKS)
    (root / "model" / name).write_bytes(content)
    found = violation_of_model(root, spec_document, model)
    assert found is not None
    assert (found.field, says in str(found.got)) == ("model.path", True), found


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [
        ({"data_check_timeout_s": 1e-9}, "headers can be read within 1e-09 s (data_check_timeout_s)"),
        ({"data_check_max_entries": 2}, "at most 2 entries below it (data_check_max_entries)"),
    ],
    ids=["time", "entries"],
)
def test_the_headers_of_many_files_are_read_within_limits(
    root: Path, spec_document: Document, limits: dict[str, Any], allowed: str
) -> None:
    model = fp8_folder(root / "model", BLOCKS, FP8)
    first = root / "model" / "model.safetensors"
    if "data_check_timeout_s" in limits:
        index = {"weight_map": {WEIGHT: "part_1.safetensors"}}
        (root / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    first.rename(root / "model" / "part_1.safetensors")
    (root / "model" / "notes.txt").write_text("")
    found = violation_of_model(root, spec_document, model, limits=limits)
    assert found is not None
    assert (found.field, allowed in str(found.allowed)) == ("model.path", True), found


def test_a_header_that_would_stop_every_thread_is_refused(root: Path, spec_document: Document) -> None:
    model = fp8_folder(root / "model", BLOCKS, FP8 | {"padding" * (2 << 20): ("BF16", [1])})
    found = violation_of_model(root, spec_document, model)
    assert found is not None
    assert "allowed: 8388608" in str(found.got), found.field


def test_images_are_checked_against_the_model(root: Path, spec_document: Document) -> None:
    np.savez(root / "images.npz", images=np.zeros((8, 32, 32, 3), np.uint8), labels=np.zeros(8, np.int64))
    document = {**spec_document, "training": {"steps": 2}, "model": {}, "data": {}}
    data = {"source": "images", "path": str(root / "images.npz")}
    assert violation(root, document, model={"preset": "swin-tiny"}, data=data) is None
    found = violation(root, document, model={"preset": "deit-s"}, data=data)
    assert found is not None
    assert found.field == "model.image_size"
    assert "32 × 32" in str(found.allowed)


def with_jsonl(root: Path, document: Document, *, template: str | None = "x", line: str = '{"messages": []}') -> Document:
    """A job that fine-tunes: a model's folder as far as admission looks at it, and two good lines before `line`."""
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    (root / "model" / "tokenizer.json").write_text("{}")
    (root / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    good = json.dumps({"prompt": "a", "completion": "b"})
    (root / "data.jsonl").write_text(f"{good}\n{good}\n{line}\n")
    data = {"source": "jsonl", "path": str(root / "data.jsonl")}
    return document | {"model": {"path": str(root / "model")}, "data": data}


GOOD_CHAT = json.dumps({"messages": [{"role": "assistant", "content": "b"}]})


@pytest.mark.parametrize(
    ("changes", "field", "got"),
    [
        ({"line": GOOD_CHAT}, None, ""),
        ({}, "data.path", "data.jsonl line 3: no message of the role assistant"),
        ({"line": GOOD_CHAT, "template": None}, "data.path", "data.jsonl line 3: messages"),
    ],
)
def test_a_job_that_fine_tunes(root: Path, spec_document: Document, changes: Document, field: str | None, got: str) -> None:
    found = violation(root, with_jsonl(root, spec_document, **changes))
    assert (found and found.field) == field
    assert found is None or str(found.got).startswith(got)


def test_a_tokenizer_below_the_roots_is_needed(root: Path, spec_document: Document) -> None:
    document = with_jsonl(root, spec_document, line=GOOD_CHAT)
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "tokenizer.json").write_text("{}")
    for path, allowed in ((outside, str(root)), (root, "a folder with a tokenizer")):
        found = violation(root, document, data={"tokenizer": str(path)})
        assert found is not None
        assert found.field == "data.tokenizer"
        assert allowed in str(found.allowed)


def test_an_object_store_is_read_only_where_the_operator_allows_it(root: Path, spec_document: Document) -> None:
    allowed = {"data_stores": ("s3://corpus/books",)}
    for url in ("s3://corpus", "s3://corpus/books-of-others", "gs://corpus/books/a"):
        found = violation(root, spec_document, data={"path": url}, limits=allowed)
        assert found is not None
        assert (found.field, found.allowed) == ("data.path", "a place below s3://corpus/books")
    assert violation(root, spec_document, data={"path": "s3://corpus/books/a"}, limits=allowed) is None
    unset = violation(root, spec_document, data={"path": "s3://corpus/books/a"})
    assert unset is not None
    assert "no object store is allowed here" in unset.allowed


def test_an_export_goes_only_where_the_operator_allows_it(root: Path, spec_document: Document) -> None:
    """A place that may be read may not be written to."""
    allowed = {"data_stores": ("s3://corpus",), "export_stores": ("s3://models/octet",)}
    for url in ("s3://models", "s3://models/octet-of-others", "s3://corpus/a"):
        found = violation(root, spec_document | {"export": {"target": url}}, limits=allowed)
        assert found is not None
        assert (found.field, found.got, found.allowed) == ("export.target", url, "a place below s3://models/octet")
        assert "OCTET_EXPORT_STORES" in found.message
    document = spec_document | {"data": {"source": "text", "path": "s3://corpus/a"}}
    assert violation(root, document | {"export": {"target": "s3://models/octet/a"}}, limits=allowed) is None
    unset = violation(root, spec_document | {"export": {"target": "s3://corpus/a"}}, limits={"data_stores": ("s3://corpus",)})
    assert unset is not None
    assert "no object store is allowed here" in unset.allowed


def test_the_tokenizer_of_a_source_in_a_store_is_checked(root: Path, spec_document: Document) -> None:
    write(root, {"tokenizer/readme": 1})
    data = {"source": "jsonl", "path": "s3://corpus/chats.jsonl", "tokenizer": str(root / "tokenizer")}
    found = violation(root, spec_document, data=data, limits={"data_stores": ("s3://corpus",)})
    assert found is not None
    assert found.field == "data.tokenizer"

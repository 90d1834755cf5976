"""s3:// as an operator sets it up: s3fs with the node's own credentials and endpoint, against a server that speaks S3.

Jobs read their data from it, and send their exports to it.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octet.api_schemas import ANY_FILE, EventReport, ExportReport, TextSpec
from octet.api_schemas.data.stores import StoreAccess, StorePath
from octet.worker.common.errors import DataError, StoreUnreachable
from octet.worker.data import open_source, stores
from octet.worker.data.stores import StoreFiles, StoreFolder
from octet.worker.data.tokens import TokensSpec
from tests.kit.object_store import files_of
from tests.kit.s3_server import serving_s3
from tests.kit.training import train
from tests.worker.data.test_sources import write_tokens
from tests.worker.data.test_stores import outcome

REASON = "s3:// needs s3fs, which is no dependency of Octet: pip install s3fs, of fsspec's version"


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with credentials of its own in its environment, which waits for no store that is gone."""
    s3fs = pytest.importorskip("s3fs", reason=REASON)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(stores, "PAUSES_S", (0.0,))
    for name, value in {
        "AWS_ACCESS_KEY_ID": "node", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1", "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


def objects_in(folder: Path, name: str) -> dict[str, bytes]:
    return {f"{name}/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.system
def test_a_job_reads_s3_as_it_reads_a_folder(
    tmp_path: Path, spec_document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, shards = Path(spec_document["data"]["path"]), write_tokens(tmp_path / "tokens")
    objects = objects_in(text, "books") | objects_in(shards, "shards") | {"secret/a.txt": b"x" * 4000}
    with serving_s3("corpus", objects) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        stored = spec_document | {"data": {"source": "text", "path": "s3://corpus/books"}}
        allowed = files_of("s3://corpus/books", cache=tmp_path / "cache")
        found = [outcome(document, tmp_path / name, allowed) for name, document in (("a", spec_document), ("b", stored))]
        losses = [each.finished.summary.evaluation_loss for each in found if each.finished and each.finished.summary]
        assert len(losses) == 2
        assert losses[0] == losses[1]
        local, in_store = (
            open_source(TokensSpec(path=path), 32, 0, files_of("s3://corpus")) for path in (str(shards), "s3://corpus/shards")
        )
        assert local.facts == in_store.facts
        assert local.train_batch(5, 8)["tokens"].equal(in_store.train_batch(5, 8)["tokens"])
        assert server.asked
        assert server.num_unsigned == 0
        with pytest.raises(DataError, match="a place below s3://corpus/books"):
            open_source(TextSpec(path="s3://corpus/secret"), 16, 0, allowed)
        files = StoreFiles.of(files_of("s3://corpus"))
        with pytest.raises(FileNotFoundError, match=r"missing\.bin"):
            files.num_bytes(StorePath("s3://corpus/missing.bin"))
    with pytest.raises(StoreUnreachable, match="could not find s3://corpus/elsewhere"):
        StoreFiles.of(files_of("s3://corpus")).num_bytes(StorePath("s3://corpus/elsewhere/new.bin"))


@pytest.mark.system
def test_a_job_exports_to_s3(tmp_path: Path, spec_document: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An export is registered when its manifest is there, which is last; one that the store takes in part is not."""
    document = spec_document | {"export": {"format": "bf16", "target": "s3://models/octet"}}
    files = replace(ANY_FILE, stores=StoreAccess(export_prefixes=("s3://models/octet",)))
    with serving_s3("models", {}) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        server.num_writes_left = 2
        recorder, summary = train(document, tmp_path / "job", files=files)
        [event] = [event for event in recorder.of(EventReport) if event.type == "export.failed"]
        assert "could not write s3://models/octet/job/" in event.message
        assert (recorder.of(ExportReport), summary.steps > 0, len(server.objects)) == ([], True, 2)
        assert not [key for key in server.objects if key.endswith("manifest.json")]

        server.num_writes_left, checkpoints = None, recorder.checkpoints()
        recorder, _ = train(document, tmp_path / "job", checkpoints, files=files)
        [report] = recorder.of(ExportReport)
        folder = tmp_path / "job" / "exports" / report.name
        assert report.address == f"s3://models/octet/job/{report.name}"
        prefix = report.address.removeprefix("s3://models/")
        assert server.objects == {f"{prefix}/{path.name}": path.read_bytes() for path in folder.iterdir()}
        assert server.written[-1] == f"{prefix}/manifest.json"
        assert hashlib.sha256(server.objects[server.written[-1]]).hexdigest() == report.sha256
        num_written = len(server.written)
        train(document, tmp_path / "job", checkpoints, files=files)
        assert (len(server.written), server.num_unsigned) == (num_written, 0)  # it is there already
        with pytest.raises(FileNotFoundError, match="s3://elsewhere"):
            StoreFolder("s3://elsewhere", StoreAccess(export_prefixes=("s3://elsewhere",))).send(
                folder, ["manifest.json"], lambda _: None
            )


@pytest.mark.system
def test_a_large_file_is_sent_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").write_bytes(bytes(101 << 20) + b"end")
    (tmp_path / "last").write_bytes(b"last")
    with serving_s3("models", {"a/last": b"of before"}) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        store = StoreFolder("s3://models/a", StoreAccess(export_prefixes=("s3://models",)))
        store.send(tmp_path, ["weights", "last"], lambda _: None)
        assert server.written == ["a/weights", "a/last"]
        assert server.objects == {f"a/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}

"""s3:// as an operator sets it up: s3fs with the node's own credentials and endpoint, against a server that speaks S3."""

from pathlib import Path
from typing import Any

import pytest

from octet.api_schemas import TextSpec
from octet.api_schemas.data.stores import StorePath
from octet.worker.common.errors import DataError, StoreUnreachable
from octet.worker.data import open_source, stores
from octet.worker.data.stores import StoreFiles
from octet.worker.data.tokens import TokensSpec
from tests.kit.object_store import files_of
from tests.kit.s3_server import serving_s3
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

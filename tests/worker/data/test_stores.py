"""Data in object stores: the bytes of local files, in ranges, kept within a bound, only where allowed, asked for again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from octet.api_schemas import FailureReason, Files, JobSpec, SpecConflict, TextSpec
from octet.api_schemas.data.stores import StoreAccess, StorePath
from octet.worker.common.config import RankEnv
from octet.worker.common.errors import DataError, StorageFull, StoreUnreachable
from octet.worker.data import open_source, stores
from octet.worker.data.store_cache import BlockCache
from octet.worker.data.stores import StoreFiles, StoreFolder
from octet.worker.data.tokens import TokensSpec
from octet.worker.metrics.table import Metrics
from octet.worker.rank.main import Outcome, Run, _train
from octet.worker.reporting.reporter import LogReporter
from tests.kit.object_store import Server, files_of, serving, upload
from tests.worker.data.test_sources import write_tokens

CONTENT = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "PAUSES_S", (0.0, 0.0))


def small_blocks(server: Server, cache: Path | None = None, **options: Any) -> StoreFiles:
    return replace(StoreFiles.of(files_of(server.url, cache=cache, **options)), block_bytes=1000)


def test_a_range_is_read_and_nothing_else(tmp_path: Path) -> None:
    with serving({"a.bin": CONTENT}) as server:
        files, path = small_blocks(server, tmp_path / "cache"), StorePath(f"{server.url}/a.bin")
        assert files.read(path, 20, 2990) == CONTENT[2990:3010]
        assert server.asked == ["bytes=2000-2999", "bytes=3000-3999"]
        assert small_blocks(server, tmp_path / "cache").read(path, 1000, 2500) == CONTENT[2500:3500]
        assert len(server.asked) == 2  # another rank of the node finds both blocks
        assert small_blocks(server).read(path) == CONTENT
        assert files.num_bytes(path) == len(CONTENT)


def test_a_file_that_changed_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    first, second = (upload_bytes(tmp_path, content) for content in (b"one", b"two"))
    assert (first, second) == (b"one", b"two")


def upload_bytes(folder: Path, content: bytes) -> bytes:
    (folder / "file").write_bytes(content)
    url = upload(folder / "file", "changed")
    return StoreFiles.of(files_of("memory://corpus", cache=folder / "cache")).read(StorePath(url))


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 40)), max_size=20), st.integers(0, 100))
def test_the_cache_never_exceeds_its_bound_and_never_changes_a_block(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[int, int]], max_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    ranks = [BlockCache(folder / "blocks", max_bytes) for _ in range(2)]
    for turn, (key, num_bytes) in enumerate(asked):
        content = bytes([key]) * num_bytes
        assert ranks[turn % 2].get(f"{key}-{num_bytes}", num_bytes, lambda content=content: content) == content
        blocks = [path for path in (folder / "blocks").glob("*") if path.name != "sum-of-bytes"]
        assert sum(path.stat().st_size for path in blocks) <= max_bytes


def test_a_full_disk_under_the_cache_is_storage_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_space)
    with pytest.raises(StorageFull, match="cache of object stores"):
        BlockCache(tmp_path, 100).get("key", 3, lambda: b"abc")


def test_a_store_that_fails_is_asked_again_and_then_ends_the_attempt(tmp_path: Path) -> None:
    with serving({"a.bin": CONTENT}) as server:
        path = StorePath(f"{server.url}/a.bin")
        files = small_blocks(server)
        assert files.num_bytes(path) == len(CONTENT)
        server.num_broken = 2
        assert files.read(path, 10) == CONTENT[:10]
        server.num_broken = 3
        with pytest.raises(StoreUnreachable, match=r"could not read .*/a\.bin in 3 tries"):
            files.read(path, 10)
        with pytest.raises(FileNotFoundError, match=r"missing\.bin"):
            files.num_bytes(StorePath(f"{server.url}/missing.bin"))
    assert FailureReason.STORE_UNREACHABLE.retryable
    assert FailureReason.STORE_UNREACHABLE.blame == "platform"


def outcome(document: dict[str, Any], folder: Path, files: Files) -> Outcome:
    return _train(JobSpec.model_validate(document), RankEnv(), Run(LogReporter(), Metrics(), folder, files=files))


def test_a_job_trains_from_a_store_what_it_trains_from_a_folder(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    url = upload(Path(spec_document["data"]["path"]), "job")
    stored = spec_document | {"data": {"source": "text", "path": url}}
    found = [
        outcome(document, tmp_path / name, files_of("memory://corpus/job", cache=tmp_path / "cache")).finished
        for name, document in (("local", spec_document), ("stored", stored))
    ]
    assert [finished.outcome for finished in found if finished] == ["succeeded", "succeeded"]
    losses = [finished.summary.evaluation_loss for finished in found if finished and finished.summary]
    assert losses[0] == losses[1]


def test_a_dead_store_is_the_platforms_failure(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    with serving({}) as server:
        url = server.url
    document = spec_document | {"data": {"source": "text", "path": url}}
    finished = outcome(document, tmp_path, files_of(url)).finished
    assert finished is not None
    assert (finished.outcome, finished.reason) == ("failed", FailureReason.STORE_UNREACHABLE)
    refused = outcome(document, tmp_path, files_of("s3://corpus")).finished
    assert refused is not None
    assert refused.reason is FailureReason.DATA_ERROR
    assert "OCTET_DATA_STORES" in (refused.message or "")


def test_a_shard_in_a_store_gives_the_tokens_of_the_file(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "tokens")
    url = upload(folder, "shards")
    local = open_source(TokensSpec(path=str(folder)), 32, 0)
    stored = open_source(TokensSpec(path=url), 32, 0, files_of("memory://corpus"))
    assert local.facts == stored.facts
    assert local.train_batch(5, 8)["tokens"].equal(stored.train_batch(5, 8)["tokens"])


def test_a_link_in_a_folder_of_the_store_file_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "secret").write_text("x" * 100)
    (tmp_path / "open" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "named").symlink_to(tmp_path / "open")
    for prefix in (f"file://{tmp_path}/open", f"file://{tmp_path}/named"):
        with pytest.raises(DataError, match="a place below"):
            open_source(TextSpec(path=f"{prefix}/link"), 16, 0, files_of(prefix))


def folder_to_send(folder: Path, **contents: bytes) -> tuple[Path, list[str]]:
    """Write files; the last one makes the others count."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder, list(contents)


def writable(*prefixes: str) -> StoreAccess:
    return StoreAccess(export_prefixes=prefixes)


def test_a_folder_is_sent_once_and_its_last_file_last(tmp_path: Path) -> None:
    folder, names = folder_to_send(tmp_path / "a", weights=CONTENT, last=b"one")
    to = tmp_path / "sent" / "below"
    store, sent = StoreFolder(f"file://{to}", writable(f"file://{tmp_path}/sent")), list[int]()
    store.send(folder, names, sent.append)
    assert [(to / name).read_bytes() for name in names] == [CONTENT, b"one"]
    store.send(folder, names, sent.append)
    assert sent == [0, 1]  # the second time nothing
    (to / "weights").write_bytes(b"short")
    store.send(folder, names, sent.append)
    assert (sent, (to / "weights").read_bytes()) == ([0, 1, 0, 1], CONTENT)


def test_what_is_sent_in_part_does_not_count(tmp_path: Path) -> None:
    """The last file of what was there before goes first, and comes when everything else is there."""
    folder, names = folder_to_send(tmp_path / "a", weights=CONTENT, more=b"more", last=b"one")
    to = tmp_path / "sent"
    store = StoreFolder(f"file://{to}", writable(f"file://{to}"))
    store.send(folder, names, lambda _: None)
    (folder / "last").write_bytes(b"two")

    def stop(num_sent: int) -> None:
        if num_sent == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.send(folder, names, stop)
    assert sorted(path.name for path in to.iterdir()) == ["more", "weights"]


def test_a_folder_goes_only_where_it_is_allowed(tmp_path: Path) -> None:
    folder, names = folder_to_send(tmp_path / "a", last=b"one")
    (tmp_path / "open").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "open" / "link").symlink_to(tmp_path / "others")
    prefix = f"file://{tmp_path}/open"
    with pytest.raises(SpecConflict, match=f"export.target: got .* a place below {prefix}"):
        StoreFolder(f"file://{tmp_path}/others", writable(prefix))
    with pytest.raises(SpecConflict, match="no object store is allowed here"):
        StoreFolder(prefix, files_of(prefix).stores)  # which may be read
    with pytest.raises(SpecConflict, match="a place below"):
        StoreFolder(f"{prefix}/link", writable(prefix)).send(folder, names, lambda _: None)
    assert list((tmp_path / "others").iterdir()) == []
    with pytest.raises(DataError, match="cannot write nowhere://"):
        StoreFolder("nowhere://a/b", writable("nowhere://a"))


def test_a_protocol_without_its_package_is_named() -> None:
    with pytest.raises(DataError, match="cannot read nowhere://"):
        open_source(TextSpec(path="nowhere://a/b"), 16, 0, files_of("nowhere://a"))


@pytest.mark.parametrize(
    "url",
    [
        "s3://a/../b",
        "s3://key:secret@a/b",
        "zip://a::s3://b",
        "s3://",
        "s3://a//b",
        "http://a/%2e%2e/b",
        "s3://a/b?v=1",
        "S3://a",
    ],
)
def test_a_url_that_could_lead_out_of_a_prefix_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="a URL"):
        TextSpec(path=url)
    with pytest.raises(ValidationError):
        StoreAccess(prefixes=(url,))


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [("s3://a/b", True), ("s3://a/b/c", True), ("s3://a/bc", False), ("s3://a", False), ("gs://a/b", False)],
)
def test_a_prefix_allows_itself_and_what_lies_below(url: str, is_allowed: bool) -> None:
    access = StoreAccess(prefixes=("s3://a/b/",))
    require: Callable[[str], None] = access.require
    if is_allowed:
        require(url)
        return
    with pytest.raises(SpecConflict, match="a place below s3://a/b"):
        require(url)


def test_the_path_of_a_store_is_no_path_of_the_file_system() -> None:
    path = StorePath("file:///data/a") / "b"
    assert str(path) == "file:///data/a/b"
    assert str(StorePath("s3://a/b").parent) == "s3://a"
    with pytest.raises(TypeError, match="object store"):
        path.read_bytes()

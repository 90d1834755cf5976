"""`octet data tokenize`: text becomes shards whose tokens are the tokenizer's own, whatever the pieces and the processes."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from octet.api_schemas import TextSpec
from octet.api_schemas.data.tokens import TokenIndex, TokensSpec
from octet.client.cli import build_app
from octet.worker.common.errors import DataError
from octet.worker.data import open_source, tokenize
from tests.kit.chat import save_tokenizer
from tests.kit.text import text, write_corpus
from tests.kit.training import train


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "PIECE_BYTES", 700)


def tokens_of(out: Path, part: str) -> list[int]:
    index = TokenIndex.read(out)
    return [int(token) for shard in getattr(index, part) for token in np.fromfile(out / shard.file, f"<{index.dtype[0]}2")]


def their_tokens(folder: Path, contents: list[str]) -> list[int]:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(folder)
    lines = [
        chain.from_iterable(theirs(line)["input_ids"] for line in content.splitlines(keepends=True)) for content in contents
    ]
    return [token for line in lines for token in (*line, theirs.eos_token_id)]


def run(path: Path, tokenizer: Path, out: Path, *options: str) -> int:
    return tokenize.main([str(path), "--tokenizer", str(tokenizer), "--out", str(out), "--processes", "1", *options])


@pytest.mark.usefixtures("small_pieces")
def test_shards_hold_the_tokenizers_tokens_of_the_files_in_order(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "corpus", num_files=5, num_sentences=40)
    (corpus / "empty.txt").write_text("")
    (corpus / "image.bin").write_bytes(b"\0\1")
    assert run(corpus, tokenizer, tmp_path / "out", "--shard-bytes", "3000") == 0
    spec = TextSpec(path=str(corpus))
    names = [name for name, _ in spec.entries(corpus) if name != "image.bin"]
    for part, files in zip(("train", "evaluation"), spec.divide_files(names), strict=True):
        contents = [(corpus / name).read_text() for name in files if name != "empty.txt"]
        ours, theirs = tokens_of(tmp_path / "out", part), their_tokens(tokenizer, contents)
        assert ours.count(theirs[-1]) == len(contents)
        assert decoded(tokenizer, ours) == decoded(tokenizer, theirs)
    index = TokenIndex.read(tmp_path / "out")
    assert len(index.train) > 2
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith(f"{len(index.train) + 1} of ")
    assert "100 % of" in printed.err.splitlines()[-1]
    assert "tokens to train on" in printed.out


def decoded(folder: Path, tokens: list[int]) -> str:
    from transformers import AutoTokenizer

    text: str = AutoTokenizer.from_pretrained(folder).decode(tokens)
    return text


@pytest.mark.usefixtures("small_pieces")
def test_a_single_file_is_divided_at_a_line_without_loss(tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text(text(100) + "the last line has no end")
    assert run(file, tokenizer, tmp_path / "out") == 0
    ours = [*tokens_of(tmp_path / "out", "train"), *tokens_of(tmp_path / "out", "evaluation")]
    assert decoded(tokenizer, ours) == file.read_text() + "<|end|>"


def test_a_job_trains_on_what_was_written(tokenizer: Path, tmp_path: Path, spec_document: dict[str, Any]) -> None:
    corpus = write_corpus(tmp_path / "corpus", num_files=3, num_sentences=120)
    assert run(corpus, tokenizer, tmp_path / "out") == 0
    source = open_source(TokensSpec(path=str(tmp_path / "out")), 16, 0)
    document = spec_document | {"data": {"source": "tokens", "path": str(tmp_path / "out")}}
    document["model"] = document["model"] | {"vocab_size": int(source.facts["vocab_size"])}
    recorder, summary = train(document, tmp_path / "job")
    assert summary.evaluation_loss < recorder.losses()[0]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [("bad.txt", b"caf\xe9 and more\n", r"bad\.txt is not UTF-8 at byte 3"), ("a.txt", None, "at least two text files")],
)
def test_a_bad_file_is_named(tokenizer: Path, tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text(text(10))
    if content is not None:
        (corpus / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        tokenize.tokenize(TextSpec(path=str(corpus)), tokenizer, tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()


def test_what_exists_is_not_overwritten(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    assert run(write_corpus(tmp_path / "corpus", num_files=2), tokenizer, tmp_path / "out") == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert run(tmp_path / "corpus", tokenizer, tmp_path / "new", "--evaluation-fraction", "2") == 2
    assert "--evaluation-fraction: " in capsys.readouterr().err
    assert run(tmp_path / "corpus", tmp_path / "corpus", tmp_path / "new") == 2
    assert "a folder with a tokenizer" in capsys.readouterr().err


@pytest.mark.system
def test_the_command_writes_the_same_with_two_processes(tokenizer: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", num_files=6, num_sentences=60)
    assert run(corpus, tokenizer, tmp_path / "one") == 0
    command = ["data", "tokenize", str(corpus), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "two")]
    assert CliRunner().invoke(build_app(), [*command, "--processes", "2"]).exit_code == 0
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {path.name for path in (tmp_path / "two").iterdir()}
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)
    assert CliRunner().invoke(build_app(), command).exit_code == 2

"""Prompts and conversations from JSONL: what counts in the loss, each record once an epoch, bad lines named early and late."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octet.api_schemas import Files, Needs, SpecConflict, TokenInput
from octet.api_schemas.data.jsonl import JsonlSpec, read_record
from octet.api_schemas.layout import BatchDivision
from octet.worker.common.errors import DataError
from octet.worker.data import VaryingTargets, open_source
from octet.worker.data.jsonl import Completions
from octet.worker.data.tokenizer import Encoded, TokenizedRecords
from octet.worker.models.cross_entropy import IGNORED
from tests.kit.chat import TEMPLATE, VOCAB_SIZE, conversation, save_tokenizer, write_chats

NEEDS = Needs(64, VOCAB_SIZE)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    return folder


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def opened(path: Path, tokenizer: Path, sequence_length: int = 64, **options: Any) -> Completions:
    source = open_source(JsonlSpec(path=str(path), tokenizer=str(tokenizer)), sequence_length, seed=0, **options)
    assert isinstance(source, Completions)
    return source


def shown(tokenizer: Any, tokens: Sequence[int], targets: Sequence[int]) -> tuple[str, str]:
    """The text of a sample, and the text of its targets that count."""
    return tokenizer.decode(list(tokens)), tokenizer.decode([target for target in targets if target != IGNORED])


def test_completions_count_and_prompts_do_not(tmp_path: Path, model_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    prompted = {"prompt": "Where is the old bridge?", "completion": " Under the river."}
    chat = {"messages": [*conversation("garden"), *conversation("doctor", 7)]}
    source = opened(write(tmp_path / "both.jsonl", prompted, chat, prompted, chat), model_folder, 96)
    batch = source.train_batch(0, 3)
    found = set()
    for tokens, targets, num_targets in zip(batch["tokens"], batch["targets"], batch["num_targets"], strict=True):
        num_inputs = int((targets != IGNORED).nonzero().max()) + 1
        counted = targets[:num_inputs] != IGNORED
        assert int(counted.sum()) == num_targets
        assert torch.equal(
            targets[: num_inputs - 1][counted[:-1]], tokens[1:num_inputs][counted[:-1]]
        )  # the token that follows
        assert set(targets[num_inputs:].tolist()) <= {IGNORED}
        found.add(shown(tokenizer, tokens[:num_inputs].tolist(), targets.tolist()))
    assert found == {
        ("Where is the old bridge? Under the river.", " Under the river.<|end|>"),
        (
            "<|user|>Where are the 1 gardens?<|end|><|assistant|>The garden is near the coast.<|end|>"
            "<|user|>Where are the 7 doctors?<|end|><|assistant|>The doctor is near the coast.",
            "The garden is near the coast.<|end|>The doctor is near the coast.<|end|>",
        ),
    }


def test_tokens_are_those_of_the_whole_text(tmp_path: Path, model_folder: Path) -> None:
    """A conversation is tokenized as the library tokenizes it at inference."""
    from transformers import AutoTokenizer

    messages = [*conversation("market"), *conversation("letter", 12)]
    source = opened(write(tmp_path / "one.jsonl", {"messages": messages}, {"messages": messages}), model_folder, 96)
    tokens, counts = source.records[0]
    theirs = AutoTokenizer.from_pretrained(model_folder).apply_chat_template(messages, return_dict=False)
    assert tokens.tolist() == theirs
    assert not counts[0]


RECORDS = st.lists(
    st.lists(st.booleans(), min_size=2, max_size=12).filter(lambda counts: any(counts[1:])), min_size=2, max_size=30
)


def completions(records: list[list[bool]], seed: int) -> Completions:
    """A source in which token 100·r + t is token t of record r; the last record evaluates."""
    encoded = (Encoded([100 * number + t for t in range(len(counts))], counts) for number, counts in enumerate(records))
    last = len(records) - 1
    return Completions(TokenizedRecords(encoded, 13), range(last), range(last, last + 1), 12, seed)


@settings(max_examples=30, deadline=None)
@given(
    records=RECORDS, seed=st.integers(0, 5), ranks=st.sampled_from([1, 2, 4]), micro=st.sampled_from([1, 2]), steps=st.data()
)
def test_any_number_of_ranks_reads_each_record_once_an_epoch(
    records: list[list[bool]], seed: int, ranks: int, micro: int, steps: st.DataObject
) -> None:
    division = BatchDivision(8, micro, ranks)
    alone, first_step = completions(records, seed), steps.draw(st.integers(0, 4))
    for position in (8 * first_step, 8 * first_step + 8):  # each rank opens the source again and resumes there
        parts = [
            completions(records, seed).train_batch(division.first_sample(position, rank, index), micro)
            for rank in range(ranks)
            for index in range(division.num_micro_batches)
        ]
        whole = alone.train_batch(position, 8)
        for name, tensor in whole.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), tensor)
        assert alone.num_targets(position, 8) == int((whole["targets"] != IGNORED).sum())
    epoch = alone.train_batch(3 * alone.num_train_samples, alone.num_train_samples)
    assert sorted(row // 100 for row in epoch["tokens"][:, 0].tolist()) == list(range(len(records) - 1))
    held_out = [batch["tokens"][0, 0] for batch in alone.evaluation_batches(4, 2, 0, 1)]
    assert [int(token) // 100 for token in held_out] == [len(records) - 1]


def test_long_records_are_cut_and_those_without_a_target_are_counted(tmp_path: Path, model_folder: Path) -> None:
    records = [{"prompt": "the " * 40, "completion": " end"}, *({"prompt": "a", "completion": " the" * 40} for _ in range(3))]
    source = opened(write(tmp_path / "long.jsonl", *records), model_folder, sequence_length=16)
    assert isinstance(source, VaryingTargets)
    assert source.facts["left_out_records"] == 1
    assert source.facts["cut_records"] == 3
    assert source.num_targets(0, 1) == 16
    with pytest.raises(DataError, match=r"long\.jsonl has 0 records .* 1 more have none"):
        opened(write(tmp_path / "long.jsonl", records[0]), model_folder, sequence_length=16)


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path, model_folder: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        write(tmp_path / name, {"prompt": name, "completion": " x"})
    lines = list(JsonlSpec(path=str(tmp_path)).lines(tmp_path))
    assert [line.record[0] for line in lines] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[]", "a list, not an object"),
        ('{"text": "a"}', "no prompt"),
        ('{"prompt": "a"}', "no completion"),
        ('{"prompt": 1, "completion": "b"}', "prompt is a int"),
        ('{"prompt": "a", "completion": ""}', "nothing to learn"),
        ('{"messages": {}}', "messages is a dict"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the role assistant"),
        ('{"messages": [{"role": "assistant"}]}', "message 0: content has to be a string"),
        ('{"messages": [1]}', "message 0 is a int"),
        ('{"messages": [{"role": "assistant", "content": ""}]}', "message 0 of the assistant is empty"),
        ('{"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}', "tool_calls is not supported"),
    ],
)
def test_a_bad_line_is_named_at_submission_and_in_the_rank(tmp_path: Path, model_folder: Path, line: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_record(line.encode())
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n\n' + line + "\n")
    spec = JsonlSpec(path=str(path), tokenizer=str(model_folder))
    with pytest.raises(SpecConflict, match=f"data.jsonl line 3: .*{says}"):
        spec.check(path, NEEDS)
    with pytest.raises(DataError, match=f"data.jsonl line 3: .*{says}"):
        open_source(spec, 64, seed=0)


def test_a_template_that_rewrites_or_refuses_is_named_with_the_line(tmp_path: Path) -> None:
    rewriting = "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }}{% endfor %}"
    refusing = "{{ raise_exception('roles must alternate') }}"
    path = write(tmp_path / "data.jsonl", {"messages": [*conversation("river"), *conversation("river")]})
    for template, says in ((rewriting, "writes message 1 in another way"), (refusing, "roles must alternate")):
        save_tokenizer(tmp_path / "model", template)
        with pytest.raises(DataError, match=rf"data\.jsonl line 1: .*{says}"):
            opened(path, tmp_path / "model")


def test_conversations_need_a_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template=None)
    path = write_chats(tmp_path / "data.jsonl", 3)
    with pytest.raises(SpecConflict, match="no chat template"):
        JsonlSpec(path=str(path), tokenizer=str(tmp_path)).check(path, NEEDS)
    with pytest.raises(DataError, match="no chat template"):
        opened(path, tmp_path)


def test_a_tokenizer_is_read_below_the_roots_alone(tmp_path: Path, model_folder: Path) -> None:
    path = write_chats(tmp_path / "data.jsonl", 3)
    inside = tmp_path / "model"
    inside.mkdir()
    files = Files.below((tmp_path,))
    with pytest.raises(DataError, match=r"data\.tokenizer: .*inside"):
        opened(path, model_folder, files=files)
    (inside / "tokenizer.json").symlink_to(model_folder / "tokenizer.json")
    with pytest.raises(DataError, match=r"data\.tokenizer: .*inside"):
        opened(path, inside, files=files)
    (inside / "tokenizer.json").unlink()
    (inside / "tokenizer.json").write_text("{}")
    (inside / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(DataError, match="transformers cannot load the tokenizer"):
        opened(path, inside, files=files)


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(tmp_path: Path, model_folder: Path) -> None:
    path = write_chats(tmp_path / "data.jsonl", 3)
    with pytest.raises(DataError, match=r"allowed: below the model's vocab_size, 100"):
        opened(path, model_folder, takes=TokenInput(100, 64))

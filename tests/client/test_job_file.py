"""Job files: what YAML would misread stays as written, and what is wrong is said as the server says it."""

import io
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from octet.client.errors import JobFileError, SpecRefused
from octet.client.job_file import apply_settings, check_spec, load_job_file


def load(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "job.yaml"
    path.write_text(text, "utf-8")
    return load_job_file(str(path))


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("02", "02"),
        ("08", "08"),
        ("on", "on"),
        ("no", "no"),
        ("2026-01-31", "2026-01-31"),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        (".5", ".5"),
        ("3e-4", 3e-4),
        ("3.0e-4", 3e-4),
        ("-5", -5),
        ("0", 0),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ("'200'", "200"),
    ],
)
def test_scalars_follow_json(tmp_path: Path, scalar: str, value: object) -> None:
    got = load(tmp_path, f"key: {scalar}\n")["key"]
    assert got == value
    assert type(got) is type(value)


def test_json_with_tabs_is_read(tmp_path: Path) -> None:
    assert load(tmp_path, '{\n\t"name": "x",\n\t"steps": 1e2}') == {"name": "x", "steps": 100.0}


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("name: piped"))
    assert load_job_file("-") == {"name": "piped"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", "'a' is given twice"),
        ("a: [1", "neither YAML nor JSON"),
        ("- a", "holds list"),
        ("", "holds nothing"),
        ("!!python/object/apply:os.getcwd []", "neither YAML nor JSON"),
        ("{[1]: 2}", "neither YAML nor JSON"),
    ],
)
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(JobFileError, match=words):
        load(tmp_path, text)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="No such file"):
        load_job_file(str(tmp_path / "absent.yaml"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(JobFileError, match="not UTF-8"):
        load_job_file(str(tmp_path / "binary"))


def test_settings_reach_into_the_document() -> None:
    document: dict[str, Any] = {"training": {"steps": 10}}
    apply_settings(document, ["training.steps=50", "precision.level=fp32", "training.optimizer.betas=[0.9, 0.95]", "name="])
    assert document == {
        "training": {"steps": 50, "optimizer": {"betas": [0.9, 0.95]}},
        "precision": {"level": "fp32"},
        "name": None,
    }


@pytest.mark.parametrize("setting", ["steps", "=5", "training..steps=5", "name.first=x", "a=[1"])
def test_settings_that_cannot_be_applied(setting: str) -> None:
    with pytest.raises(JobFileError, match="--set"):
        apply_settings({"name": "x"}, [setting])


def test_a_valid_document_is_a_spec(spec: dict[str, Any]) -> None:
    assert check_spec(spec, "job.yaml").training.steps == 100


def test_violations_name_field_got_allowed_and_change(spec: dict[str, Any]) -> None:
    spec["precision"] = yaml.safe_load("{level: '02'}")
    spec["model"]["num_heads"] = 3
    spec["trainin"] = {}
    with pytest.raises(SpecRefused) as refused:
        check_spec(spec, "job.yaml")
    by_field = {violation.field: violation for violation in refused.value.violations}
    assert set(by_field) == {"precision.level", "model.num_heads", "trainin"}
    text = str(refused.value)
    assert "3 fields to change" in text
    assert "got:     02" in text
    assert "Did you mean 'O2', with the letter O?" in text
    assert "allowed: a divisor of hidden_size 128" in text
    assert "Did you mean 'training'?" in text
    assert "change:  Change model.num_heads or model.hidden_size." in text


def test_a_yaml_integer_for_the_level_is_understood(spec: dict[str, Any]) -> None:
    """Other tools write 02 as the number 2."""
    spec["precision"] = {"level": 2}
    with pytest.raises(SpecRefused, match="Did you mean 'O2'"):
        check_spec(spec, "job.yaml")


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(f'*{before}' for _ in range(9))}]\n" for before, name in pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ALIASES, r"the alias \*a"),
        ("base: &base {steps: 1}\ntraining: {<<: *base}\n", r"the alias \*base"),
        ("name: x\nlist: [" + "1, " * 20_000 + "]", "more than 2000 values"),
        ("key: " + "[" * 60_000, "50 in one another"),
        ("[" * 60_000, "neither YAML nor JSON"),
        ("".join(f"k{number}: 1\n" for number in range(6_000)), "more than 2000 values"),
        ("key: '" + "x" * 70_000 + "'", "more than 65536 characters"),
        ('{"key": ' + "9" * 5000 + "}", "neither YAML nor JSON"),
    ],
)
def test_what_is_far_too_much_for_a_job_is_refused_quickly(tmp_path: Path, text: str, words: str) -> None:
    began = time.process_time()
    with pytest.raises(JobFileError, match=words):
        load(tmp_path, text)
    assert time.process_time() - began < 10


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(JobFileError, match="more than"):
        load_job_file("/dev/zero")

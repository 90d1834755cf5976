"""The table of rules: every path exists, every conflict is found, and the page and the JSON made from it are current."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from octet.api_schemas import ExportSpec, ImageInput, JobSpec, OptimizerSpec, ScheduleSpec, SpecConflict, TokenInput, explain
from octet.api_schemas.evaluation import EvaluationSpec
from octet.api_schemas.models import FAMILIES, Capabilities
from octet.api_schemas.rules.document import rules_as_page
from octet.api_schemas.rules.parts import LEARNING_RATE, OPTIMIZER
from octet.api_schemas.rules.rule import Amount, Facts, Rule, Table, above, differs, equals, multiple_of
from octet.api_schemas.rules.table import JOB, RULES
from tests.api_schemas.test_job_spec import EXAMPLE

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"


def test_the_page_is_current() -> None:
    current = rules_as_page()
    if os.environ.get("OCTET_UPDATE_SNAPSHOTS"):
        PAGE.write_text(current)
    assert current == PAGE.read_text(), "a rule changed: run `make snapshots` and review the diff of docs/combinations.md"


def test_no_rule_stands_in_the_table_twice() -> None:
    assert len(set(RULES)) == len(RULES)


def test_defaults_of_numbers_are_those_of_their_contracts() -> None:
    for table, contract in ((OPTIMIZER, OptimizerSpec), (LEARNING_RATE, ScheduleSpec)):
        for rule in table:
            assert rule.must.value == contract.model_fields[rule.field.rpartition(".")[2]].default


def test_each_conflict_of_a_job_is_found() -> None:
    with pytest.raises(ValidationError) as raised:
        JobSpec.model_validate(EXAMPLE | {"parallelism": {"tensor": 2, "context": 2}, "adapter": {}})
    assert [violation.field for violation in explain(raised.value, JobSpec)] == ["resources.workers"]
    spec = JobSpec.model_validate(EXAMPLE)
    parallelism = spec.parallelism.model_copy(update={"tensor": 2, "context": 2, "pipeline": 2})
    broken = spec.model_copy(update={"parallelism": parallelism})
    assert [conflict.field for conflict in JOB.conflicts(Facts(broken))] == [
        *("parallelism.context", "resources.workers", "resources.workers", "resources.workers"),
    ]


DEGREE = st.sampled_from([1, 2, 4])
SWITCH = st.booleans()


@given(
    parallelism=st.fixed_dictionaries(
        {
            "tensor": DEGREE,
            "context": DEGREE,
            "pipeline": DEGREE,
            "sequence": SWITCH,
            "zero_stage": st.integers(0, 3),
            "schedule": st.sampled_from(["1f1b", "interleaved"]),
        }
    ),
    training=st.fixed_dictionaries(
        {
            "fused_loss": SWITCH,
            "offload_optimizer": SWITCH,
            "gradient_release": SWITCH,
            "gradient_clip": st.sampled_from([None, 1.0]),
            "ema_decay": st.sampled_from([None, 0.9]),
            "compile": st.sampled_from(["auto", "on", "off"]),
        }
    ),
    level=st.sampled_from(["fp32", "fp16-amp", "ao", "O2"]),
    workers=st.sampled_from([1, 2, 3, 4, 8]),
    micro_batch_size=st.sampled_from([None, 1, 3]),
)
def test_a_job_is_refused_for_the_first_of_its_conflicts(
    parallelism: dict[str, Any], training: dict[str, Any], level: str, workers: int, micro_batch_size: int | None
) -> None:
    """All conflicts are listed without an error, even of jobs whose ranks do not divide."""
    document = EXAMPLE | {"parallelism": parallelism, "precision": {"level": level}, "resources": {"workers": workers}}
    document["training"] = EXAMPLE["training"] | training | {"micro_batch_size": micro_batch_size}
    example = JobSpec.model_validate(EXAMPLE)
    parts = {name: getattr(example, name) for name in JobSpec.model_fields}
    for name in ("parallelism", "training", "precision", "resources"):
        parts[name] = type(parts[name]).model_validate(document[name])
    found = list(JOB.conflicts(Facts(JobSpec.model_construct(**parts))))
    try:
        JobSpec.model_validate(document)
    except ValidationError as error:
        (violation,) = explain(error, JobSpec)
        first = found[0]
        assert (violation.field, violation.got, violation.allowed) == (first.field, first.got, first.allowed)
        assert violation.message == first.change
    else:
        assert found == []


def sample_of(family: str) -> Any:
    without_presets: dict[str, dict[str, Any]] = {
        "huggingface": {"path": "/models/saved"},
        "python": {"entrypoint": "a.b:c"},
    }
    presets = FAMILIES[family].presets
    return FAMILIES[family].model_validate({"preset": next(iter(presets))} if presets else without_presets[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_path_of_a_rule_exists(family: str) -> None:
    """No rule names a field that has been renamed. Fields that only some models have stand behind a condition."""
    model = sample_of(family)
    parts = {"model": model, "export": ExportSpec(), "evaluation": EvaluationSpec(path="/tasks", tasks=("a",))}
    spec = JobSpec.model_validate(EXAMPLE).model_copy(update=parts)
    facts = Facts(spec)
    paths = {condition.path for rule in JOB for condition in (*rule.when, rule.must)}
    behind = {
        TokenInput: ("num_channels",),
        ImageInput: ("max_sequence_length", "mask_token", "keeps_documents_apart", "vocab_size"),
    }
    left_out = {f"model.sizes.takes.{name}" for name in behind[type(model.sizes.takes)]}
    left_out |= set() if model.sizes.capabilities.pipeline else {"model.sizes.num_layers"}
    left_out |= set() if model.sizes.capabilities.expert else {"model.sizes.num_experts"}
    for path in paths - left_out - {"data.tokenizer"}:
        facts[path]  # an AttributeError names a path that does not exist


def test_a_family_that_declares_nothing_can_do_nothing() -> None:
    assert not any(vars(Capabilities()).values())
    for family, spec in FAMILIES.items():
        able = {name for name, is_able in vars(sample_of(family).sizes.capabilities).items() if is_able}
        assert able <= {name for name, is_able in vars(spec.sizes_type.declared).items() if is_able}, family


class Bag:
    """A job of four numbers."""

    def __init__(self, **numbers: object) -> None:
        vars(self).update(numbers)


ODD = Rule(
    "ranks", must=multiple_of("ranks", "rows", "columns", times=2), allowed="a multiple of {name}, {value}", change="Go."
)


def test_a_rule_says_what_it_found_and_leaves_out_what_has_no_effect() -> None:
    conflict = Table(ODD).first_conflict(Facts(Bag(ranks=6, rows=1, columns=4)))
    assert conflict is not None
    assert str(conflict) == "ranks: got 6; allowed: a multiple of 2 · columns, 8. Go."
    assert Table(ODD).first_conflict(Facts(Bag(ranks=16, rows=2, columns=4))) is None


def test_what_follows_a_false_condition_is_not_looked_at() -> None:
    rule = Rule("ranks", when=(above("ranks", 9), differs("nowhere", 1)), must=equals("ranks", 10), allowed="10", change="Go.")
    assert tuple(Table(rule).conflicts(Facts(Bag(ranks=6)))) == ()


def test_an_amount_is_named_by_its_fields() -> None:
    amount = Amount(("ranks",), ("rows", "columns"))
    assert amount.name() == "ranks / rows / columns"
    assert amount.name(Facts(Bag(ranks=1, rows=1, columns=1))) == "ranks"


def test_a_conflict_with_another_fields_path_names_that_field() -> None:
    moved = SpecConflict("data.path", "/x", "a file", "Change data.path.").moved_to("model.path")
    assert (moved.field, moved.change) == ("model.path", "Change model.path.")

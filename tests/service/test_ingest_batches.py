"""Every batch that the parser accepts the contract accepts too, and means the same; it judges everything else."""

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, get_args

import msgspec
import pytest
from pydantic import ValidationError

from octet.api_schemas import ReportBatch, report
from octet.service.errors import InvalidRequest
from octet.service.ingest import batches
from octet.service.ingest.batches import Batch, ReportBody, read_batch

STEP = {"kind": "step", "step": 3, "loss": 1.5, "gradient_norm": None, "learning_rate": 1, "tokens": 0, "step_time_s": 0.1}
STEP |= {"data_wait_s": 0.0}
SUMMARY = {
    "steps": 4,
    "final_loss": 1.5,
    "evaluation_loss": 1.25,
    "evaluation_perplexity": 3.49,
    "tokens": 512,
    "tokens_per_s": 256.0,
    "train_time_s": 2.0,
    "num_parameters": 1000,
    "num_converted_parameters": 800,
    "memory_bytes": {"weights": 4000},
    "converted_memory_bytes": {"weights": 3200},
    "peak_memory_bytes": None,
    "data": {"unigram_entropy_nats": 3.0},
}
STARTED = {"kind": "started", "node": "a", "device": "cpu"}
STARTED |= dict.fromkeys(
    ["resumed_from_step", "world_size", "num_parameters", "num_layers_converted", "num_layers_filtered", "num_layers_skipped"],
    1,
)
BODIES: dict[str, dict[str, Any]] = {
    "exporter": {"kind": "exporter", "address": "[::1]:9100"},
    "phase": {"kind": "phase", "phase": "process_up"},
    "started": STARTED | {"steps": 10},
    "step": STEP,
    "evaluation": {"kind": "evaluation", "step": 1, "loss": None, "tokens": 3, "metrics": {"top1": 0.5, "top5": None}},
    "checkpoint": {
        "kind": "checkpoint",
        "step": 1,
        "name": "step_0000000001",
        "num_bytes": 1,
        "sha256": "a" * 64,
        "loss": None,
    },
    "measured": {
        "kind": "measured",
        "step": 1,
        "memory": {"held": {"weights": 1}, "fp32": {"weights": 4}, "host": 0, "peak": None},
        "layers": [
            {"layer": "h.0", "operand": "input", "step": 1, "amax": 1.5, "dequant_scale": None}
            | dict.fromkeys(["overflow_ratio", "underflow_ratio", "sqnr_db"], 0.5)
        ],
    },
    "log": {"kind": "log", "level": "INFO", "message": "a\u0000ü"},
    "event": {"kind": "event", "type": "a.b", "message": "m", "data": {"a": 1, "b": 1.5, "c": True, "d": None, "e": "f"}},
    "finished": {
        "kind": "finished",
        "outcome": "failed",
        "reason": "worker_lost",
        "message": "m",
        "summary": SUMMARY,
    },
}
HOSTILE: list[Any] = [
    *(None, True, "", "x", "1", 0, -1, 1, 1.0, 1.5, 2**53, 2**53 + 1, 2**70, -(2**70), 10**400, [], {}, [1], {"a": 1}),
    *({"a": "x\n"}, {"A": 1}, {"a": []}, {"a" * 65: 1}, {f"m{n}": 1.0 for n in range(17)}, SUMMARY | {"more": 1}, {"steps": 1}),
    *("x" * 17, "x" * 4097, "x" * 16_385, "step_0000000001\n", "b" * 64 + "\n", "a.b\n", "host:1\n", "host:123456", "a..b"),
    *("process_up", "failed", "cancelled", "worker_lost", "out_of_memory", "\u0000"),
]
RAW = ("-0", "1e2", "1.0", "1E400", "-1e400", "9007199254740993", "1e-400", "01", "+1", ".5", "1.", "NaN", "-Infinity")
RAW += ('"\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', "9" * 4299, "9" * 5000, '{"a": 1, "a": "b"}', '{"a": NaN}', "[" * 500)


def batch_of(body: Any, **changes: Any) -> dict[str, Any]:
    return {"epoch": 1, "rank": 0, "reports": [{"seq": 7, "at": "2026-11-22T14:00:00.123456Z", "body": body}]} | changes


def judged(content: bytes) -> Any:
    """Return how the contract reads a batch, as a document; None if it refuses."""
    try:
        return json.loads(ReportBatch.model_validate_json(content).model_dump_json())
    except ValidationError:
        return None


def read(content: bytes) -> Any:
    """Return how the parser reads a batch, in the words of the contract; None if it refuses."""
    try:
        batch = read_batch(content)
    except (ValidationError, InvalidRequest):
        return None
    assert all(each.at.tzinfo is UTC for each in batch.reports)
    return judged(written(batch))


def written(batch: Batch) -> bytes:
    """Write what the parser has read as a rank would send it."""
    reports = [{"seq": each.seq, "at": each.at, "body": body_of(each.body)} for each in batch.reports]
    return msgspec.json.encode({"epoch": batch.epoch, "rank": batch.rank, "reports": reports})


def body_of(body: ReportBody) -> Any:
    return body if isinstance(body, batches.StepReport) else json.loads(body.model_dump_json())


@pytest.mark.parametrize("kind", BODIES)
def test_every_kind_is_read_as_by_the_contract_without_a_look_at_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.dumps(batch_of(BODIES[kind])).encode()
    with monkeypatch.context() as without_the_contract:
        without_the_contract.delattr(batches, "ReportBatch")
        (found,) = read_batch(content).reports
    assert isinstance(found.body, batches.StepReport if kind == "step" else getattr(report, f"{kind.title()}Report"))
    assert read(content) == judged(content) != None  # noqa: E711


def test_every_kind_of_the_contract_has_an_example() -> None:
    union, _ = get_args(report.ReportBody)
    kinds = {each.model_fields["kind"].default for each in get_args(union)}
    assert kinds == {*BODIES, "export"}
    assert {each.__name__ for each in get_args(ReportBody)} == {each.__name__ for each in get_args(union)}


def test_the_struct_has_the_fields_of_its_contract() -> None:
    fields = {each.name: each.required for each in msgspec.structs.fields(batches.StepReport)}
    assert fields == {name: each.is_required() or name == "kind" for name, each in report.StepReport.model_fields.items()}


@pytest.mark.parametrize("kind", BODIES)
def test_any_value_of_any_field_is_judged_by_the_contract(kind: str) -> None:
    body = BODIES[kind]
    contents = [json.dumps(batch_of(body | {name: value})).encode() for name in body for value in HOSTILE]
    contents += [json.dumps(batch_of({name: body[name] for name in body if name != left})).encode() for left in body]
    contents.append(json.dumps(batch_of(body | {"more": 1})).encode())
    for name in body:
        marked = json.dumps(batch_of(body | {name: "MARK"}))
        contents += [marked.replace('"MARK"', raw).encode() for raw in RAW]
    for content in contents:
        assert read(content) == judged(content), content[:300]


def test_the_envelope_is_judged_by_the_contract() -> None:
    reports = batch_of(STEP)["reports"]
    documents = [batch_of(STEP, **{name: value}) for name in ("epoch", "rank", "reports") for value in HOSTILE]
    documents += [batch_of(STEP, reports=[reports[0] | {name: value}]) for name in ("seq", "at") for value in HOSTILE]
    documents += [batch_of(STEP, more=1), batch_of(STEP, reports=reports * 1001), {"epoch": 1, "rank": 3}, {"epoch": 1}]
    for content in [*(json.dumps(each).encode() for each in documents), b"{", b"\xff", b'{"epoch": 1, "rank": "\xff"}', b"[]"]:
        assert read(content) == judged(content), content[:300]


def test_what_a_rank_may_send_is_read_however_large_and_full_of_commas_it_is() -> None:
    line = {"kind": "log", "level": "INFO", "message": "," * 16_384}
    surrogates = {"kind": "log", "level": "INFO", "message": "\N{GRINNING FACE}" * 16_384}
    for bodies in ([line] * 100, [surrogates] * 10, [BODIES["event"]] * 1000, [STEP] * 1000):
        reports = [batch_of(body)["reports"][0] for body in bodies]
        assert len(read_batch(json.dumps(batch_of(None, reports=reports)).encode()).reports) == len(bodies)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch": 1, "rank": 0} | {f"k{number}": 1 for number in range(10_000)},
        batch_of({"kind": "log"} | {f"k{number}": 1 for number in range(30_000)}),
        batch_of({"kind": "log", "level": "INFO", "message": "x" * 300_000}),
        batch_of(STEP, reports=[batch_of(STEP | {"step": 0})["reports"][0]] * 1000),
    ],
)
def test_what_is_wrong_with_a_large_batch_is_not_explained(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """So the contract, which lists every mistake, does not see it."""
    monkeypatch.delattr(batches, "ReportBatch")
    with pytest.raises(InvalidRequest, match="Send a few small reports alone"):
        read_batch(json.dumps(wrong).encode())


MOMENTS = ["2026-11-22T14:00:00+01:00", "2026-11-22T14:00:00+00:00", "2026-11-22T14:00:00", "2026-11-22T14:00:00-00:00"]
MOMENTS += ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59.999999Z", "2026-11-22 14:00:00Z"]
MOMENTS += ["2026-11-22T24:00:00Z", "2026-11-22T14:00:60Z", "2026-02-30T00:00:00Z", "20261122T140000Z", "1700000000", ""]


@pytest.mark.parametrize("at", MOMENTS)
def test_a_moment_is_read_as_the_contract_reads_it(at: str) -> None:
    document = batch_of(STEP)
    document["reports"][0]["at"] = at
    content = json.dumps(document).encode()
    assert read(content) == judged(content)


def test_moments_of_other_zones_are_of_utc_afterwards() -> None:
    document = batch_of(STEP)
    document["reports"][0]["at"] = "2026-11-22T15:00:00+01:00"
    (found,) = read_batch(json.dumps(document).encode()).reports
    assert found.at == datetime(2026, 11, 22, 15, tzinfo=timezone(timedelta(hours=1)))
    assert isinstance(found.body, batches.StepReport)

"""A job as the client shows it, with and without each of its parts. Control characters never reach the terminal."""

import io
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console, RenderableType

from octet.api_schemas import Attempt, Checkpoint, Job, JobState, JobSummary, LogLine, Pool
from octet.api_schemas.catalog import model_families
from octet.api_schemas.curve import Curve, CurveEvaluations
from octet.api_schemas.job_plan import JobPlan, StepRange
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.plan import Fit, Plan, PlanRow, StagePlan
from octet.api_schemas.quotas import TenantUse
from octet.api_schemas.rows import Row
from octet.client import render
from octet.client.text import duration, num_bytes, number, printable

MakeJob = Callable[..., Job]
MakeSummary = Callable[..., JobSummary]
AT = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


def lines(what: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def facts(job: Job, checkpoints: Sequence[Checkpoint] = ()) -> dict[str, str]:
    split = [line.split(maxsplit=1) for line in lines(render.job_details(job, checkpoints))]
    return {words[0]: words[1] for words in split}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (60, "1:00"),
        (754.6, "12:35"),
        (3661, "1:01:01"),
        (90000, "1 day, 1:00:00"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(None, "–"), (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (12_345_678, "12.3 MB"), (10**18, "1e+03 PB")]
)
def test_bytes(count: int | None, text: str) -> None:
    assert num_bytes(count) == text


def test_numbers_keep_zero_and_mark_what_is_missing() -> None:
    assert [number(0.0), number(None), number(12345.678, ",.0f")] == ["0.0000", "–", "12,346"]


def test_control_characters_are_written_out() -> None:
    assert printable("a\x1b[31mred\r\x9b\ttab\nline") == "a\\x1b[31mred\\x0d\\x9b\ttab\nline"


def test_every_state_has_a_style() -> None:
    assert set(render.STATE_STYLES) == set(JobState)


def row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "id": "job_0123456789abcdefghjkmnpqrs", "name": "first", "tenant": "default", "pool": "cpu", "level": "O2",
        "state": "running", "reason": None, "why": None, "position": None, "step": None, "steps": 100, "loss": None,
        "best_evaluation_loss": None, "tokens_per_s": None, "remaining_s": None, "created_at": AT, "started_at": None,
        "finished_at": None, "sparkline": (),
    }  # fmt: skip
    return Row.model_validate(fields | changes)


def test_jobs_are_listed_with_and_without_progress() -> None:
    rows = [row(created_at=datetime.now(UTC)), row(step=7, loss=2.5, remaining_s=61.0)]
    header, first, second = lines(render.rows_table(rows, is_narrow=False))
    assert header.split() == ["ID", "NAME", "LEVEL", "STATE", "STEP", "LOSS", "WHEN"]
    assert " ".join(first.split()) == "job_0123456789abcdefghjkmnpqrs first O2 running –/100 – 0 s ago"
    assert second.split()[4:] == ["7/100", "2.5000", "1:01", "left"]


def test_a_job_of_epochs_has_no_number_of_steps_until_a_rank_counts_them() -> None:
    assert "–/–" in lines(render.rows_table([row(steps=None)], is_narrow=False))[1]


def test_on_a_terminal_ids_are_as_short_as_tells_them_apart() -> None:
    ids = ["job_0123456789abcdefghjkmnpqrs", "job_0123456789abcdeXghjkmnpqrs", "job_1123456789abcdefghjkmnpqrs"]
    table = render.rows_table([row(id=each) for each in ids], is_narrow=True)
    shown = [line.split()[0] for line in lines(table)[1:]]
    assert shown == [each[: len("job_0123456789abcdef")] for each in ids]
    (alone,) = lines(render.rows_table([row()], is_narrow=True))[1:]
    assert alone.split()[0] == "job_0123456789"


WORST = "a-name-of-one-hundred-characters" * 3
LONG = {"step": 123_456, "steps": 1_000_000, "loss": 12.3456, "level": "O3-split-8bit", "state": "cancelling", "name": WORST}


def test_tables_fit_80_columns_and_cut_names_before_numbers(make_job: MakeJob) -> None:
    attempt = Attempt.model_validate(
        dict.fromkeys(Attempt.model_fields)
        | {
            "object": "attempt", "id": "att_1", "job_id": "job_1", "epoch": 12, "state": "succeeded", "pool": "cpu",
            "workers": 1, "node": "ip-10-0-0-1.eu-central-1.compute.internal", "device": "NVIDIA H100 80GB HBM3",
            "created_at": AT, "first_step_at": AT, "resumed_from_step": 100_000, "last_step": 200_000,
            "reason": "out_of_memory",
            "message": WORST,
        }
    )  # fmt: skip
    checkpoint = {"id": f"ckpt_{'0' * 26}", "job_id": "job_1", "attempt_id": "att_1", "created_at": AT, "sha256": "0" * 64}
    pool = {
        "name": "p" * 32,
        "accelerator": "cuda",
        "slots": 1024,
        "slots_present": 1024,
        "slots_used": 1024,
        "jobs_queued": 99_999,
        "jobs_live": 1024,
        "memory_per_device_bytes": 10**11,
        "threads_per_worker": 16,
        "measured_to_planned": 1.04,
        "step_time_to_planned": 1.18,
    }
    usage = {
        "tenant": "t" * 32,
        "month_ends_at": AT,
        "storage_bytes": 10**12,
        "most_storage_bytes": 2 * 10**12,
        "pools": [{
            "pool": "p" * 32, "slots": 1024, "most_slots": 2048, "jobs": 99, "most_jobs": 100, "slot_hours": 123_400.0,
            "most_slot_hours": 500_000.0,
        }],
    }  # fmt: skip
    whole = {
        "rows": (render.rows_table([row(**LONG)] * 2, is_narrow=True), ["123456/1000000", "12.3456", "cancelling"]),
        "attempts": (render.attempts_table([attempt]), ["succeeded", "100000", "200000", "0.0 s"]),
        "checkpoints": (
            render.checkpoints_table(
                [Checkpoint.model_validate(checkpoint | {"step": 10**6, "num_bytes": 10**12, "loss": 1.5})]
            ),
            [f"ckpt_{'0' * 26}", "1000000", "2026-01-31 12:00"],
        ),
        "levels": (render.levels_table(LEVELS.values()), ["fp16+scale", "≤ 11.1", "companded"]),
        "models": (render.models_table(model_families()), ["gpt-175b", "2.79 TB", "vit-1.2b (deit)"]),
        "pools": (
            render.pools_table([Pool.model_validate(pool)]),
            ["99999", "100 GB", "cuda", "jobs took 104.0% of their planned bytes, steps\n118%"],
        ),
        "usage": (
            render.usage_table([TenantUse.model_validate(usage)]),
            ["1,024 of 2,048", "99 of 100", "1.234e+05 of 5e+05", "1 TB of 2 TB"],
        ),
        "curve": (render.curve_table(curve(1000, metrics=("top1_accuracy", "top5_accuracy"))), ["1000", "12.00%", "TOP5 ACC"]),
    }
    for name, (table, numbers) in whole.items():
        console = Console(file=io.StringIO(), width=80, force_terminal=False)
        console.print(table)
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert max(map(len, text.splitlines())) <= 80, name
        for word in numbers:
            assert word in text, (name, word)


def curve(last: int, step_by: int = 500, loss: float = 2.0, metrics: tuple[str, ...] = ()) -> Curve:
    steps = tuple(range(step_by, last + 1, step_by))
    same = (loss,) * len(steps)
    counts = (step_by,) * len(steps)
    evaluations = {"step": steps[-1:], "loss": (loss,), "loss_least": (loss,), "loss_greatest": (loss,)}
    return Curve(
        job_id="job_1", step_by=step_by, first_step=1, last_step=last, has_more=False, cursor="", step=steps, at=same,
        num_steps=counts, num_not_finite=(0,) * len(steps), loss=same, loss_least=same, loss_greatest=same, gradient_norm=same,
        gradient_norm_greatest=same, learning_rate=same, tokens=counts, step_time_s=same, data_wait_s=same,
        evaluations=CurveEvaluations.model_validate(evaluations | {"metrics": dict.fromkeys(metrics, (0.12,))}),
    )  # fmt: skip


def test_a_curve_has_a_row_for_each_bucket_and_a_column_for_each_metric_of_its_family() -> None:
    header, first, second = lines(render.curve_table(curve(1000, metrics=("top1_accuracy",))))
    assert "EVAL LOSS  TOP1 ACC  GRAD NORM" in header
    assert first.split() == ["500", "2.0000", "–", "–", "2.000", "2.00e+00", "250", "0.0", "s"]
    assert second.split()[:4] == ["1000", "2.0000", "2.0000", "12.00%"]


def test_jobs_are_compared_in_buckets_of_equal_width() -> None:
    header, *rows = lines(render.comparison_table(["fp32", "O2"], [curve(1000), curve(500, loss=2.1)]))
    assert header.split() == ["STEP", "FP32", "O2", "DIFF"]
    assert [line.split() for line in rows] == [
        ["500", "2.0000", "2.1000", "+5.00%"],
        ["1000", "2.0000", "–", "–"],
        ["eval", "1000", "2.0000", "–", "–"],
    ]


def test_families_without_presets_are_listed_with_what_a_job_names_instead() -> None:
    shown = {line.split()[0]: line for line in lines(render.models_table(model_families()))}
    assert "138 architectures" in shown["huggingface"]
    assert "your own network" in shown["python"]
    presets = {preset.name for family in model_families() for preset in family.presets}
    assert shown.keys() == {"PRESET", "huggingface", "python"} | presets


def test_a_queued_job_says_why_it_waits(make_job: MakeJob) -> None:
    job = make_job(state="queued", queue={"position": 2, "why": "1 of 2 slots is free"})
    assert facts(job)["waits"] == "number 2 in pool cpu: 1 of 2 slots is free"
    assert render.progress_words(job) == "1 of 2 slots is free"


def test_a_failed_job_says_why_and_what_to_do(make_job: MakeJob) -> None:
    job = make_job(state="failed", reason="out_of_memory", message="\x1b[2Jgone", hint="Lower it.", num_failures=1)
    shown = facts(job)
    assert shown["reason"] == "out_of_memory: \\x1b[2Jgone"
    assert shown["hint"] == "Lower it."
    assert shown["attempts"] == "1, 1 failed; failures of its own are retried 0 times"


def test_settings_that_are_not_applied_are_named(make_job: MakeJob) -> None:
    job = make_job()
    sharded = job.spec.precision.model_copy(update={"not_applied": ("fsdp_config: fsdp_version: set parallelism.zero_stage",)})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"precision": sharded})})
    assert facts(job)["ignored"] == "fsdp_config: fsdp_version: set parallelism.zero_stage"


def test_results_of_a_job(make_job: MakeJob, make_summary: MakeSummary) -> None:
    checkpoint = {"id": "ckpt_1", "job_id": "job_1", "attempt_id": "att_1", "created_at": AT, "sha256": "0" * 64}
    newest = [Checkpoint.model_validate(checkpoint | {"step": s, "num_bytes": 2_000_000, "loss": 1.5}) for s in (50, 100, 75)]
    shown = facts(make_job(state="succeeded", summary=make_summary()), newest)
    assert shown["checkpoints"] == "3, the newest at step 100 (2 MB)"
    assert shown["evaluation"] == "loss 2.0000, perplexity 7.389"
    assert shown["speed"] == "5,120 tokens/s, 25,600 tokens in 1:05"
    assert shown["memory"] == "16 kB: weights 4 kB, gradients 4 kB, exp_avg 4 kB, exp_avg_sq 4 kB"
    assert "host" not in shown


def test_scores_have_their_intervals(make_job: MakeJob, make_summary: MakeSummary) -> None:
    scores = {"capitals_acc": 0.25, "capitals_acc_half_width": 0.125, "texts_bits_per_byte": 4.5}
    shown = facts(make_job(state="succeeded", summary=make_summary(evaluation_metrics=scores)))
    assert (shown["capitals"].split(None, 1)[1], shown["texts"].split()[-1]) == ("25.00% ± 12.50%", "4.5")


def test_a_plan_is_shown_beside_what_was_measured(make_job: MakeJob, make_summary: MakeSummary) -> None:
    plan = JobPlan(
        asked_level="auto",
        level="O2",
        verdict="tight",
        memory_per_device_bytes=80 * 10**9,
        micro_batch_size=4,
        largest_micro_batch=2,
        peak_bytes=75 * 10**9,
        lower_bytes=75 * 10**9,
        upper_bytes=81 * 10**9,
        planner_version="1",
    )
    summary = make_summary(peak_memory_bytes=78 * 10**9, reserved_memory_bytes=79 * 10**9, step_time_s=1.25)
    plan = plan.model_copy(update={"predicted_step": StepRange(least_s=0.91234, most_s=1.9)})
    shown = facts(make_job(state="succeeded", summary=summary, plan=plan, measured_to_planned=1.04))
    assert shown["level"] == f"{make_job().spec.precision.level}, chosen for auto"
    assert shown["plan"] == "fits or not, by what CUDA and NCCL take: peak 75 GB to 81 GB, a device of 80 GB"
    assert shown["peak"] == "78 GB allocated, 79 GB reserved"
    assert shown["measured"] == "104.0% of the plan's peak"
    assert shown["step"] == "1.25 s, the median, predicted 0.912 to 1.9 s"
    unknown = plan.model_copy(update={"verdict": "unknown", "reason": "no peak today"})
    assert facts(make_job(plan=unknown))["plan"] == "not known to fit a device of 80 GB: no peak today"


def test_a_plan_names_converted_layers_once_for_levels_that_convert_the_same() -> None:
    left = {"excluded by name": 4}
    rows = [
        PlanRow(
            level="bf16-amp",
            peak_by_class={"weights": 10**9, "master_weights": 0, "activations": 3 * 10**9},
            stages=(StagePlan(pipeline_rank=0, num_blocks=12, states={"weights": 10**9}, peak_bytes=4 * 10**9),),
        ),
        *(PlanRow(level=level, converted_layers=44, left_layers=left) for level in ("O1", "O2")),
        PlanRow(level="O3", converted_layers=48, left_layers={}),
    ]
    shown = lines(render.plan_details(Plan(pool="gpu", workers=1, micro_batch_size=1, rows=tuple(rows))))
    assert "O1, O2: 44 linear layers converted; 4 left in 16 bits, excluded by name" in shown
    assert "O3: 48 linear layers converted" in shown
    assert "bf16-amp at the peak: activations 3 GB, weights 1 GB" in shown
    assert "  rank 0 of the pipeline: 12 blocks, states 1 GB, peak 4 GB" in shown


def test_a_plan_has_the_room_of_every_level_and_the_details_of_the_jobs_own() -> None:
    fit = Fit(pool="gpu", memory_per_device_bytes=80 * 10**9, verdict="tight", free_bytes=10**9, largest_micro_batch=2048)
    timed = fit.model_copy(update={"verdict": "yes", "predicted": StepRange(least_s=0.91, most_s=1.9)})
    rows = [
        PlanRow(level=level, peak_by_class={"weights": 10**9}, fits=(fit,))
        for level, fit in (("te", fit), ("O2", timed), ("O3", fit.model_copy(update={"pool": "other"})))
    ]
    plan = Plan(pool="gpu", workers=1, micro_batch_size=4, rows=tuple(rows))
    shown = lines(render.plan_details(plan, "O2"))
    heading, *table = (line.split()[8:] for line in shown[:4])
    assert heading == ["FITS", "BATCH", "SECONDS"]
    assert table == [["maybe", "2,048", "–"], ["fits", "2,048", "0.91", "to", "1.9"], ["–", "–", "–"]]
    assert shown[4:] == [
        "O2 at the peak: weights 1 GB",
        "O2 in pool gpu: fits, 1 GB free; largest micro-batch 2048, now 4",
        "  predicted 0.91 to 1.9 s a step",
    ]
    chosen = plan.model_copy(update={"chosen_level": "te"})
    for each, level, levels in ((plan, "fp32", ["te", "O2", "O3"]), (chosen, "auto", ["te"])):
        found = [line for line in lines(render.plan_details(each, level)) if "at the peak" in line]
        assert found == [f"{name} at the peak: weights 1 GB" for name in levels]


def test_states_in_host_memory_have_a_line_of_their_own(make_job: MakeJob, make_summary: MakeSummary) -> None:
    shown = facts(make_job(state="succeeded", summary=make_summary(host_memory_bytes=8000)))
    assert shown["memory"].startswith("16 kB: ")
    assert shown["host"].split() == ["memory", "8", "kB"]


def test_progress_hides_what_is_not_known(make_job: MakeJob) -> None:
    progress: dict[str, Any] = {"step": 7, "steps": 100, "loss": None, "tokens_per_s": None, "remaining_s": None}
    progress["reported_at"] = AT
    assert render.progress_words(make_job(progress=progress)) == "step 7/100, loss –"
    progress |= {"loss": 2.5, "tokens_per_s": 5120.4, "remaining_s": 61.0}
    assert render.progress_words(make_job(progress=progress)) == "step 7/100, loss 2.5000, 5,120 tokens/s, 1:01 left"


def log_line(message: str, level: str = "INFO", at: datetime = AT) -> LogLine:
    return LogLine(seq=1, at=at, attempt_id="att_1", rank=3, level=level, message=message)


def test_a_log_names_the_day_once_and_rank_and_level_where_they_tell_something() -> None:
    shown = render.Lines(has_several_ranks=True)
    assert lines(shown.log(log_line("step 1"))) == ["Saturday, 2026-01-31, UTC", "12:00:00  rank 3    step 1"]
    assert lines(shown.log(log_line("careful", "WARNING"))) == ["12:00:00  rank 3    WARNING  careful"]
    next_day = datetime(2026, 2, 1, 0, 0, 1, tzinfo=UTC)
    assert lines(render.Lines().log(log_line("alone", at=next_day)))[1:] == ["00:00:01  alone"]
    assert lines(shown.log(log_line("late", at=next_day)))[0] == "Sunday, 2026-02-01, UTC"


def test_a_traceback_in_the_log_keeps_its_lines_below_its_beginning() -> None:
    shown = lines(render.Lines().log(log_line("Traceback\n  File \x1b[1m", "ERROR")))
    assert shown[1:] == ["12:00:00  ERROR  Traceback", "            File \\x1b[1m"]


def test_what_waits_or_failed_says_why() -> None:
    waiting = row(state="queued", why="no slot is free")
    failed = row(name="second", state="failed", reason="data_error", why="gone\x1b[2J")
    assert lines(render.reasons([waiting, row(why="unseen"), failed])) == [
        "first waits: no slot is free",
        "second failed, data_error: gone\\x1b[2J",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (59, "59 s"), (60, "1 min"), (7300, "2 h"), (200_000, "2 d")])
def test_an_age_is_told_by_its_largest_unit(seconds: int, text: str) -> None:
    assert render.age(datetime.now(UTC) - timedelta(seconds=seconds)) == text


def test_a_time_is_local_with_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "CET-1")
    time.tzset()
    try:
        assert render.moment(datetime(2026, 1, 31, 23, 30, tzinfo=UTC)) == "2026-02-01 00:30:00 CET"
    finally:
        monkeypatch.undo()
        time.tzset()

"""Levels: jobs that share a `comparison` label, at several precision levels, side by side."""

from deploy.grafana.model import Board, Panel, Query, Row, Variable

# The info series of the jobs in this comparison; multiplying by it selects them.
_THESE = '* on (job_id) group_left () max by (job_id) (max_over_time(octet_job_info{comparison="$comparison"}[$__range]))'
_NOW = '* on (job_id) group_left () max by (job_id) (octet_job_info{comparison="$comparison"})'
# While the job runs: the last value is exposed for some minutes after its end, and would weigh more than the run itself.
_SPEED = '(octet_job_tokens_per_second and on (job_id) octet_job_state{state="running"})'


def _last(metric: str) -> str:
    """The last value by level within the time shown; the job may have ended."""
    return f"max by (level) (max by (job_id, level) (last_over_time({metric}[$__range])) {_THESE})"


def _memory(selector: str = "") -> str:
    """Bytes by level and class."""
    held = f"last_over_time(octet_job_memory_bytes{selector}[$__range])"
    return f"max by (level, class) (max by (job_id, level, class) ({held}) {_THESE})"


_HELD = f"sum by (level) ({_memory()})"
_BASELINE = "scalar(sum(" + _memory('{level="bf16-amp"}') + "))"

BOARD = Board(
    uid="octet-levels",
    title="Octet / Levels",
    description="One spec at several levels: `octet compare`, or jobs submitted with the same `comparison` label.",
    variables=(Variable("comparison", "Comparison", 'label_values(octet_job_info{comparison!=""}, comparison)'),),
    rows=(
        Row(
            "Quality",
            (
                Panel(
                    "Training loss by step",
                    "A point for each time that a job was scraped, wherever in time it ran; nats per token.",
                    "short",
                    (
                        Query(f"max by (job_id, level) (octet_job_step) {_NOW}", "step"),
                        Query(f"max by (job_id, level) (octet_job_loss) {_NOW}", "{{level}}"),
                    ),
                    kind="xy",
                    width=12,
                ),
                Panel(
                    "Evaluation loss",
                    "After the last evaluation of each job, nats per token.",
                    "short",
                    (Query(_last("octet_job_evaluation_loss"), "{{level}}"),),
                    kind="bars",
                    width=6,
                ),
                Panel(
                    "Steps done",
                    "Losses compare at the same step only.",
                    "short",
                    (Query(_last("octet_job_step"), "{{level}}"),),
                    kind="bars",
                    width=6,
                ),
            ),
        ),
        Row(
            "Speed",
            (
                Panel(
                    "Throughput",
                    "Tokens per second over all ranks, by time, while the job runs.",
                    "short",
                    (Query(f"max by (level) (max by (job_id, level) {_SPEED} {_NOW})", "{{level}}"),),
                    width=12,
                ),
                Panel(
                    "Throughput, mean",
                    "Tokens per second over all ranks, mean over the time in which the job ran.",
                    "short",
                    (
                        Query(
                            f"max by (level) (max by (job_id, level) (avg_over_time({_SPEED}[$__range:])) {_THESE})",
                            "{{level}}",
                        ),
                    ),
                    kind="bars",
                    width=12,
                ),
            ),
        ),
        Row(
            "Memory",
            (
                Panel(
                    "Memory by class",
                    "Bytes on rank 0 as counted from live tensors, of jobs that succeeded.",
                    "bytes",
                    (Query(f"{_memory()} > 0", "{{level}} {{class}}"),),
                    kind="bars",
                    width=12,
                ),
                Panel(
                    "Memory held",
                    "All classes together.",
                    "bytes",
                    (Query(_HELD, "{{level}}"),),
                    kind="bars",
                    width=6,
                ),
                Panel(
                    "Saving against bf16-amp",
                    "One minus the bytes held over those of the job at bf16-amp in the same comparison.",
                    "percentunit",
                    (Query(f"1 - {_HELD} / {_BASELINE}", "{{level}}"),),
                    kind="bars",
                    width=6,
                ),
            ),
        ),
    ),
)

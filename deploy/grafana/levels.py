"""Levels: jobs that share a `comparison` label, at several precision levels, side by side."""

from deploy.grafana.model import Board, Query, Variable, panel, row, stat_panel

# The info series of the jobs in this comparison; multiplying by it selects them.
_THESE = '* on (job_id) group_left () max by (job_id) (max_over_time(octet_job_info{comparison="$comparison"}[$__range]))'
_NOW = '* on (job_id) group_left () max by (job_id) (octet_job_info{comparison="$comparison"})'
_YARDSTICK = '{level="$yardstick"}'
# While the job runs: the last value is exposed for some minutes after its end, and would weigh more than the run itself.
_SPEED = '(octet_job_tokens_per_second and on (job_id) octet_job_state{state="running"})'


def _last(metric: str) -> str:
    """The last value by level within the time shown; the job may have ended."""
    return f"max by (level) (max by (job_id, level) (last_over_time({metric}[$__range])) {_THESE})"


def _memory(selector: str = "") -> str:
    """Bytes by level and class."""
    held = f"last_over_time(octet_job_memory_bytes{selector}[$__range])"
    return f"max by (level, class) (max by (job_id, level, class) ({held}) {_THESE})"


def _held(selector: str = "") -> str:
    return f"sum by (level) ({_memory(selector)})"


def _mean(metric: str, selector: str = "") -> str:
    """The mean by level, over the seeds of each, of a value as it last was within the time shown."""
    return f"avg by (level) (max by (job_id, level) (last_over_time({metric}{selector}[$__range])) {_THESE})"


def _seeds(metric: str) -> str:
    """The last value of each job at the yardstick's level."""
    return f"max by (job_id) (last_over_time({metric}{_YARDSTICK}[$__range])) {_THESE}"


def _evaluated(selector: str = "") -> str:
    """Evaluation losses by job, level and step, of all evaluations within the time shown.

    `count_values` makes a label of the step, so that evaluations after the same step meet, whenever each job ran.
    """
    steps = 'count_values by (job_id) ("step", max by (job_id) (octet_job_evaluation_step))'
    loss = f"max by (job_id, level) (octet_job_evaluation_loss{selector}) * on (job_id) group_left (step) {steps}"
    return f"max by (job_id, level, step) (last_over_time(({loss})[$__range:])) {_THESE}"


def _curve(expr: str, name: str) -> str:
    return f'label_replace({expr}, "curve", "{name}", "", "")'


_OF_YARDSTICK = f"avg by (step) ({_evaluated(_YARDSTICK)})"
_SEVERAL = f"(count by (step) ({_evaluated(_YARDSTICK)}) > 1)"
_DIFFERENCE = f"avg by (level, step) ({_evaluated()}) / on (step) group_left () {_OF_YARDSTICK} - 1"
_BAND = {
    end: f"({of} by (step) ({_evaluated(_YARDSTICK)}) / {_OF_YARDSTICK} - 1) and on (step) {_SEVERAL}"
    for end, of in (("highest", "max"), ("lowest", "min"))
}
_CURVES = " or ".join(
    [
        f'label_replace({_DIFFERENCE}, "curve", "$1", "level", "(.+)")',
        *(_curve(expr, f"yardstick, {end} of its seeds") for end, expr in _BAND.items()),
    ]
)
_LOSS = "octet_job_evaluation_loss"


def _speed(selector: str = "") -> str:
    of_level = _SPEED.replace("octet_job_tokens_per_second", f"octet_job_tokens_per_second{selector}")
    return f"avg by (level) (max by (job_id, level) (avg_over_time({of_level}[$__range:])) {_THESE})"


def _against_yardstick(values: str, of_yardstick: str) -> str:
    return f"{values} / scalar(sum({of_yardstick})) - 1"


BOARD = Board(
    uid="octet-levels",
    title="Octet / Levels",
    description="One spec at several levels: `octet compare`, or jobs submitted with the same `comparison` label.",
    variables=(
        Variable("comparison", "Comparison", 'label_values(octet_job_info{comparison!=""}, comparison)'),
        Variable(
            "yardstick", "Yardstick", 'label_values(octet_job_info{comparison="$comparison", level=~"fp32|.*-amp"}, level)'
        ),
    ),
    rows=(
        row(
            "Is it worth it",
            panel(
                "Each level against the yardstick",
                "Difference to the yardstick's job, or to the mean of its seeds: loss of the last evaluation, bytes held, "
                "tokens per second. A loss within the seeds' band is no difference; fewer bytes and more speed are gains.",
                "percentunit",
                Query(_against_yardstick(_mean(_LOSS), _mean(_LOSS, _YARDSTICK)), "evaluation loss"),
                Query(_against_yardstick(_held(), _held(_YARDSTICK)), "bytes held"),
                Query(_against_yardstick(_speed(), _speed(_YARDSTICK)), "tokens per second"),
                kind="table",
                width=16,
            ),
            stat_panel(
                "Band of the yardstick's seeds",
                "Of the last evaluation: how far the highest and the lowest of its seeds lie apart, as a share of their "
                "mean. 0 with one seed: submit the yardstick with several values of training.seed to know the band.",
                "percentunit",
                Query(
                    f"(max({_seeds(_LOSS)}) - min({_seeds(_LOSS)})) / avg({_seeds(_LOSS)})",
                    "band",
                ),
                width=8,
            ),
        ),
        row(
            "Quality",
            panel(
                "Evaluation loss against the yardstick",
                "Difference to the yardstick after the same step, as a share of its loss; 0 is the yardstick. Its seeds, "
                "where there are several, span the band within which a difference means nothing.",
                "percentunit",
                Query(_CURVES, "{{curve}}"),
                kind="by_step",
                width=12,
                from_zero=False,
            ),
            panel(
                "Training loss by step",
                "A point for each time that a job was scraped, wherever in time it ran; nats per token.",
                "short",
                Query(f"max by (job_id, level) (octet_job_step) {_NOW}", "step"),
                Query(f"max by (job_id, level) (octet_job_loss) {_NOW}", "{{level}}"),
                kind="xy",
                width=12,
            ),
            stat_panel(
                "Evaluation loss",
                "After the last evaluation of each job, nats per token, mean over the seeds of a level.",
                "short",
                Query(_mean(_LOSS), "{{level}}"),
                width=12,
            ),
            stat_panel(
                "Steps done",
                "Losses compare at the same step only.",
                "short",
                Query(_last("octet_job_step"), "{{level}}"),
                width=12,
            ),
        ),
        row(
            "Speed",
            panel(
                "Throughput",
                "Tokens per second over all ranks, by time, while the job runs.",
                "short",
                Query(f"max by (level) (max by (job_id, level) {_SPEED} {_NOW})", "{{level}}"),
                width=12,
            ),
            panel(
                "Throughput, mean",
                "Tokens per second over all ranks, mean over the time in which the job ran.",
                "short",
                Query(_speed(), "{{level}}"),
                kind="bars",
                width=12,
            ),
        ),
        row(
            "Memory",
            panel(
                "Memory by class",
                "Bytes on rank 0 as counted from live tensors, of jobs that succeeded.",
                "bytes",
                Query(f"{_memory()} > 0", "{{level}} {{class}}"),
                kind="bars",
                width=12,
            ),
            panel(
                "Memory held",
                "All classes together.",
                "bytes",
                Query(_held(), "{{level}}"),
                kind="bars",
                width=6,
            ),
            panel(
                "Bytes saved against the yardstick",
                "One minus the bytes held over those of the yardstick's job in the same comparison.",
                "percentunit",
                Query(f"1 - {_held()} / scalar(sum({_held(_YARDSTICK)}))", "{{level}}"),
                kind="bars",
                width=6,
                from_zero=False,
            ),
        ),
    ),
)

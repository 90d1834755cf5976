"""Fleet: is the queue moving, are the slots used, what fails, how long does a start take."""

from deploy.grafana.model import Board, Query, Variable, panel, row, stat_panel

# Every api process tells the same of the database: `max` makes one of them, the sum comes after.
_JOBS = 'max by (state, pool) (octet_jobs{pool=~"$pool"})'
_ENDED = "max by (outcome, reason) (increase(octet_attempts_total[$__rate_interval]))"
_LIVE = 'and on (job_id) octet_job_state{state!~"succeeded|failed|cancelled"}'


def _of_live(metric: str) -> str:
    """The value of each live job, with the job's name and state."""
    value = f"max by (job_id, tenant, level, pool) ({metric} {_LIVE})"
    name = "on (job_id) group_left (name) max by (job_id, name) (octet_job_info)"
    return f"{value} * {name} * on (job_id) group_left (state) topk by (job_id) (1, octet_job_state)"


BOARD = Board(
    uid="octet-fleet",
    title="Octet / Fleet",
    description="Queue, slots, attempts and failures over all pools.",
    variables=(Variable("pool", "Pool", "label_values(octet_pool_slots, pool)", multi=True),),
    range="now-6h",
    rows=(
        row(
            "Now",
            stat_panel(
                "Jobs running",
                "Jobs that train now.",
                "short",
                Query('sum(max by (pool) (octet_jobs{state="running", pool=~"$pool"})) or vector(0)', "running"),
                width=4,
            ),
            stat_panel(
                "Jobs queued",
                "Jobs that wait for slots, or for their next try.",
                "short",
                Query('sum(max by (pool) (octet_jobs{state="queued", pool=~"$pool"})) or vector(0)', "queued"),
                width=4,
            ),
            stat_panel(
                "Longest wait",
                "How long the job that waits longest has waited. Alerts after half an hour.",
                "s",
                Query('max(octet_queue_oldest_wait_seconds{pool=~"$pool"})', "waits"),
                width=4,
            ),
            stat_panel(
                "Slots used",
                "Share of the slots that are there now. A slot counts until its processes are known to be gone.",
                "percentunit",
                Query('max(pool:octet_pool_slots_used:ratio{pool=~"$pool"})', "fullest pool"),
                width=4,
            ),
            stat_panel(
                "Attempts that failed",
                "In the time that is shown.",
                "short",
                Query('round(sum(max by (reason) (increase(octet_attempts_total{outcome="failed"}[$__range]))))', "failed"),
                width=4,
            ),
            stat_panel(
                "Tokens per second",
                "Of all jobs together, by what they last reported.",
                "short",
                Query(
                    f'sum(max by (job_id) (octet_job_tokens_per_second{{pool=~"$pool"}} {_LIVE})) or vector(0)',
                    "tokens/s",
                ),
                width=4,
            ),
        ),
        row(
            "Queue and slots",
            panel(
                "Jobs by state",
                "Every job that the database has.",
                "short",
                Query(f"sum by (state) ({_JOBS})", "{{state}}"),
                kind="stacked",
            ),
            panel(
                "Longest wait by pool",
                "Of the job that waits longest now.",
                "s",
                Query('max by (pool) (octet_queue_oldest_wait_seconds{pool=~"$pool"})', "{{pool}}"),
            ),
            panel(
                "Slots",
                "Configured, there now, and taken. A gap between the first two means nodes are away.",
                "short",
                Query('max by (pool, kind) (octet_pool_slots{pool=~"$pool"})', "{{pool}} {{kind}}"),
            ),
            panel(
                "Wait for a slot",
                "From the queue to a slot, of the jobs that got one in the time that is shown.",
                "s",
                Query(
                    "histogram_quantile(0.5, sum by (le) (increase(octet_job_queue_wait_seconds_bucket[$__range])))",
                    "median",
                ),
                Query(
                    "histogram_quantile(0.95, sum by (le) (increase(octet_job_queue_wait_seconds_bucket[$__range])))",
                    "95th percentile",
                ),
                width=12,
            ),
            panel(
                "Start overhead, 95th percentile",
                "Of each phase of the starts in the time that is shown.",
                "s",
                Query(
                    "histogram_quantile(0.95, sum by (phase, le)"
                    " (increase(octet_job_start_overhead_seconds_bucket[$__range])))",
                    "{{phase}}",
                ),
                width=12,
            ),
        ),
        row(
            "Attempts",
            panel(
                "Attempts that ended",
                "By outcome.",
                "short",
                Query(f"sum by (outcome) ({_ENDED})", "{{outcome}}"),
                kind="stacked",
            ),
            panel(
                "Failures by reason",
                "docs/job-lifecycle.md tells what each reason means and who is to blame.",
                "short",
                Query(
                    'max by (reason) (increase(octet_attempts_total{outcome="failed"}[$__rate_interval]))',
                    "{{reason}}",
                ),
                kind="stacked",
            ),
            panel(
                "Start overhead",
                "Mean time that each phase of a start takes, of the starts in the time that is shown.",
                "s",
                Query(
                    "sum by (phase) (increase(octet_job_start_overhead_seconds_sum[$__range]))"
                    " / sum by (phase) (increase(octet_job_start_overhead_seconds_count[$__range]))",
                    "{{phase}}",
                ),
                kind="stacked",
            ),
            panel(
                "Live jobs",
                "What each job that has not ended last reported. Click one to open it.",
                "short",
                Query(_of_live("octet_job_step"), "step"),
                Query(_of_live("octet_job_steps"), "steps"),
                Query(_of_live("octet_job_loss"), "loss"),
                Query(_of_live("octet_job_tokens_per_second"), "tokens/s"),
                Query(_of_live("octet_job_attempts"), "attempts"),
                Query(_of_live("octet_job_failures"), "failures"),
                kind="table",
                width=24,
                hidden=("job_id",),
            ),
        ),
    ),
)

"""Service: does the control plane answer, how fast, and is anything lost between it and the ranks."""

from deploy.grafana.model import Board, Query, panel, row, stat_panel

_COUNT = "octet_http_request_duration_seconds_count[$__rate_interval]"
_ROUTES = "sum by (route, le) (rate(octet_http_request_duration_seconds_bucket[$__rate_interval]))"
_LAG = "sum by (instance, le) (rate(octet_event_loop_lag_seconds_bucket[$__rate_interval]))"
_TRANSACTIONS = "octet_database_transaction_duration_seconds"

_REQUESTS = row(
    "Requests",
    panel("Requests", "Each second, by route.", "reqps", Query(f"sum by (route) (rate({_COUNT}))", "{{route}}")),
    panel("Answers", "Each second, by status code.", "reqps", Query(f"sum by (code) (rate({_COUNT}))", "{{code}}")),
    panel(
        "Errors",
        "Share of requests answered with 5xx, over five minutes, half an hour, one hour and six. The goal is 0.1 %.",
        "percentunit",
        Query("service:octet_http_errors:ratio5m", "5 min"),
        Query("service:octet_http_errors:ratio30m", "30 min"),
        Query("service:octet_http_errors:ratio1h", "1 h"),
        Query("service:octet_http_errors:ratio6h", "6 h"),
    ),
    panel(
        "Latency, 99th percentile",
        "Until the answer begins, by route, over five minutes.",
        "s",
        Query("route:octet_http_request_duration_seconds:p99_5m", "{{route}}"),
    ),
    panel(
        "Latency, median",
        "Until the answer begins, by route.",
        "s",
        Query(f"histogram_quantile(0.5, {_ROUTES})", "{{route}}"),
    ),
    panel(
        "Refused keys",
        "Requests each second without a key, with one that nobody knows, or with a role that may not. The audit has who.",
        "reqps",
        Query("sum(rate(octet_refused_keys_total[$__rate_interval]))", "refused"),
    ),
)

_CONTROL = row(
    "Control",
    stat_panel(
        "A dispatcher leads",
        "1 while some process holds the lease; 0: jobs are taken and none is started.",
        "short",
        Query("max(octet_dispatcher_leads)", "leads"),
        width=4,
    ),
    stat_panel(
        "Processes up",
        "API processes that answer Prometheus, and those it knows; then the ranks that answer.",
        "short",
        Query('sum(up{job="octet-api"})', "api up"),
        Query('count(up{job="octet-api"})', "api known"),
        Query('count(up{job="octet-rank"} == 1) or vector(0)', "ranks up"),
        width=8,
    ),
    stat_panel(
        "Version",
        "What runs.",
        "short",
        Query("max by (version) (octet_build_info)", "{{version}}"),
        width=4,
        names=True,
    ),
    stat_panel(
        "Series left out",
        "Dropped because a rank or a job was over its budget, in the time that is shown; and jobs without series of "
        "their own, over the newest two hundred.",
        "short",
        Query("sum(increase(octet_exporter_dropped_series_total[$__range]))", "series"),
        Query("max(octet_jobs_hidden)", "jobs"),
        width=8,
    ),
    panel(
        "Leases",
        "Of live attempts: held, and over but not yet acted upon.",
        "short",
        Query("max by (state) (octet_attempt_leases)", "{{state}}"),
    ),
    panel(
        "Leases that ran out",
        "Attempts that could not reach the control plane for longer than their lease, in ten minutes. Three alert.",
        "short",
        Query(
            'max(increase(octet_attempts_total{outcome="failed", reason="lease_expired"}[10m]))',
            "lease expired",
        ),
    ),
    panel(
        "Loops of the dispatcher",
        "Failed steps of each loop, in ten minutes; and 1 while a loop makes no progress, which alerts.",
        "short",
        Query("sum by (loop) (increase(octet_loop_failures_total[10m]))", "{{loop}} failed"),
        Query("max by (loop) (octet_dispatcher_loop_stalled)", "{{loop}} stalled"),
    ),
    panel(
        "Fenced writes",
        "Reports refused because their attempt no longer counts: each is a second life that was stopped.",
        "short",
        Query("sum by (instance) (increase(octet_fenced_writes_total[$__rate_interval]))", "{{instance}}"),
    ),
)

_INSIDE = row(
    "Processes and database",
    panel(
        "Event-loop lag",
        "How late a timer runs: what every request waits for on top.",
        "s",
        Query(f"histogram_quantile(0.99, {_LAG})", "{{instance}} 99th percentile"),
        Query(f"histogram_quantile(0.5, {_LAG})", "{{instance}} median"),
    ),
    panel(
        "Transactions",
        "Each second, by kind.",
        "ops",
        Query(f"sum by (kind) (rate({_TRANSACTIONS}_count[$__rate_interval]))", "{{kind}}"),
    ),
    panel(
        "Transaction time, 99th percentile",
        "Until committed, with the wait for the one writer of SQLite.",
        "s",
        Query(
            f"histogram_quantile(0.99, sum by (kind, le) (rate({_TRANSACTIONS}_bucket[$__rate_interval])))",
            "{{kind}}",
        ),
    ),
    panel(
        "Database errors",
        "Transactions that the database refused or broke.",
        "short",
        Query("sum by (kind) (increase(octet_database_errors_total[$__rate_interval]))", "{{kind}}"),
    ),
    panel("Database size", "On disk.", "bytes", Query("max(octet_database_size_bytes)", "size")),
    panel(
        "Memory",
        "Resident, by process.",
        "bytes",
        Query('process_resident_memory_bytes{job="octet-api"}', "{{instance}}"),
    ),
    panel(
        "Processor",
        "Cores in use, by process.",
        "short",
        Query('rate(process_cpu_seconds_total{job="octet-api"}[$__rate_interval])', "{{instance}}"),
    ),
    panel(
        "Open files",
        "Share of those allowed, by process.",
        "percentunit",
        Query('process_open_fds{job="octet-api"} / process_max_fds{job="octet-api"}', "{{instance}}"),
    ),
    panel(
        "Scrape time",
        "How long an answer to Prometheus takes, the slowest of each kind.",
        "s",
        Query('max by (job) (scrape_duration_seconds{job=~"octet-.*"})', "{{job}}"),
    ),
)

BOARD = Board(
    uid="octet-service",
    title="Octet / Service",
    description="The control plane: requests, leases, event loop, database.",
    rows=(_REQUESTS, _CONTROL, _INSIDE),
)

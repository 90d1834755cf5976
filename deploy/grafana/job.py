"""Job: one job from its loss down to the bits on the wire."""

from deploy.grafana.model import Annotation, Board, Query, Variable, panel, row, stat_panel

_JOB = '{job_id="$job_id"}'
_RATE = "[$__rate_interval]"


def _reported(metric: str) -> str:
    """The control plane's last values; every api process serves the same ones."""
    return f"max({metric}{_JOB})"


def _by(label: str, metric: str, selector: str = _JOB) -> str:
    return f"max by ({label}) ({metric}{selector})"


def _changed(metric: str, selector: str = _JOB) -> str:
    """A value at the moment at which the series begins or changes, and at no other: scrapes that were missed are no change."""
    now, before = f"max({metric}{selector})", f"max(last_over_time({metric}{selector}[5m] offset $__interval))"
    return f"{now} != {before} or ({now} unless {before})"


_MEASURED = f'{_JOB[:-1]}, metric!~".+_half_width"}}'
_SCORES = f"octet_job_evaluation_metric{_MEASURED}"
_OF_HALF_WIDTHS = f'octet_job_evaluation_metric{_JOB[:-1]}, metric=~".+_half_width"}}'
_HALF_WIDTHS = f'label_replace({_OF_HALF_WIDTHS}, "metric", "$1", "metric", "(.+)_half_width")'

_NOW = row(
    "Now",
    stat_panel(
        "State",
        "Also which level and pool it belongs to.",
        "short",
        Query(f"max by (state, level, pool) (octet_job_state{_JOB})", "{{state}} · {{level}} · {{pool}}"),
        width=8,
        names=True,
    ),
    stat_panel(
        "Done",
        "Share of the steps.",
        "percentunit",
        Query(f"{_reported('octet_job_step')} / {_reported('octet_job_steps')}", "done"),
        width=8,
    ),
    stat_panel(
        "Time left",
        "At the speed of the last step.",
        "s",
        Query(_reported("octet_job_remaining_seconds"), "left"),
        width=8,
    ),
    panel(
        "Loss",
        "Training loss of each step and loss of each evaluation, nats per token. Steps in between are in the API's curve.",
        "short",
        Query(_reported("octet_job_loss"), "training"),
        Query(_reported("octet_job_evaluation_loss"), "evaluation"),
        width=12,
        from_zero=False,
    ),
    panel(
        "Tokens per second",
        "Over all ranks: counted by the ranks over a minute, and as last reported.",
        "short",
        Query(f"sum(job_id:octet_train_tokens:rate1m{_JOB})", "over a minute"),
        Query(_reported("octet_job_tokens_per_second"), "last step"),
        width=6,
    ),
    panel(
        "Memory by class",
        "Bytes of live tensors on rank 0 after the first step's backward pass. Activations: what one micro-batch saves.",
        "bytes",
        Query(_by("class", "octet_memory_bytes", '{job_id="$job_id", rank="0"}'), "{{class}}"),
        kind="stacked",
        width=6,
    ),
)

_LEARNING = row(
    "Learning",
    panel(
        "Gradient norm",
        "Global L2 norm before clipping, as last reported and as each rank has it: they must agree.",
        "short",
        Query(_reported("octet_job_gradient_norm"), "reported"),
        Query(_by("rank", "octet_train_gradient_norm"), "rank {{rank}}"),
    ),
    panel(
        "Learning rate",
        "Of the last step, as last reported and as the ranks have it.",
        "sci",
        Query(_reported("octet_job_learning_rate"), "reported"),
        Query(f"max(octet_train_learning_rate{_JOB})", "ranks"),
    ),
    panel(
        "Steps that were not finite",
        "Loss or gradient norm NaN or infinite, by rank. Ten in a row end the job.",
        "short",
        Query(_by("rank", "octet_train_non_finite_steps_total"), "rank {{rank}}"),
    ),
    panel(
        "Step",
        "By rank: they must go together.",
        "short",
        Query(_by("rank", "octet_train_step"), "rank {{rank}}"),
        width=12,
    ),
    panel(
        "Loss as each rank sees it",
        "The mean over the global batch, so all ranks tell the same; another value is a rank out of step.",
        "short",
        Query(_by("rank", "octet_train_loss"), "rank {{rank}}"),
        Query(_by("rank", "octet_train_evaluation_loss"), "rank {{rank}} evaluation"),
        width=12,
        from_zero=False,
    ),
    panel(
        "Accuracy",
        "Of each evaluation, as the model's family measures it: of tokens, of masked tokens, top-1 and top-5 of images.",
        "percentunit",
        Query(_by("metric", "octet_job_evaluation_metric", _MEASURED), "{{metric}}"),
        Query(_by("metric, rank", "octet_train_evaluation_metric"), "rank {{rank}} {{metric}}"),
        width=12,
    ),
    panel(
        "Scores of tasks",
        "Of `evaluation`, on the newest export that has any, with the ends of their 95 % intervals.",
        "short",
        Query(f"max by (metric) ({_SCORES} and {_HALF_WIDTHS})", "{{metric}}"),
        Query(f"max by (metric) ({_SCORES} - {_HALF_WIDTHS})", "{{metric}} least"),
        Query(f"max by (metric) ({_SCORES} + {_HALF_WIDTHS})", "{{metric}} most"),
        width=12,
        from_zero=False,
        needs="tasks",
    ),
    panel(
        "Perplexity",
        "exp of the loss of each evaluation, as last reported and as each rank has it.",
        "short",
        Query(_reported("octet_job_evaluation_perplexity"), "reported"),
        Query(_by("rank", "octet_train_evaluation_perplexity"), "rank {{rank}}"),
        width=12,
        from_zero=False,
    ),
    is_collapsed=True,
)

_SPEED = row(
    "Speed",
    panel(
        "Sequences per second",
        "Over all ranks.",
        "short",
        Query(f"sum(rate(octet_train_samples_total{_JOB}{_RATE}))", "sequences/s"),
    ),
    panel(
        "Model FLOP/s",
        "6 per parameter and token and 12·L·D·T for attention; what is recomputed does not count. By rank.",
        "flops",
        Query(f"sum by (rank) (rate(octet_train_flops_total{_JOB}{_RATE}))", "rank {{rank}}"),
    ),
    panel(
        "Step time",
        "Of the last step by rank, the mean over five minutes, and what the control plane last heard.",
        "s",
        Query(_by("rank", "octet_train_step_duration_seconds"), "rank {{rank}}"),
        Query(f"max(job_id:octet_train_step_seconds:mean5m{_JOB})", "mean of five minutes"),
        Query(_reported("octet_job_step_duration_seconds"), "last reported"),
    ),
    panel(
        "Time that a rank computes",
        "In the last step, without its waits for other ranks: the slowest five ranks, and the median. The others wait for "
        "a rank that stands out; the event rank.straggler names it.",
        "s",
        Query(f"topk(5, {_by('rank', 'octet_train_busy_seconds')})", "rank {{rank}}"),
        Query(f"quantile(0.5, {_by('rank', 'octet_train_busy_seconds')})", "median"),
    ),
    panel(
        "Where the time goes",
        "Share of the wall time by phase, mean over ranks, as the host sees it: on cuda, work queued in one phase may be "
        "waited for in the next.",
        "percentunit",
        Query(
            f"sum by (phase) (rate(octet_train_seconds_total{_JOB}{_RATE})) / scalar(count(octet_train_step{_JOB}))",
            "{{phase}}",
        ),
        kind="stacked",
    ),
    panel(
        "Wait for data",
        "In the last step.",
        "s",
        Query(_reported("octet_job_data_wait_seconds"), "wait for data"),
    ),
    panel(
        "Attempts and failures",
        "Attempts that were placed, and those of them that failed.",
        "short",
        Query(_reported("octet_job_attempts"), "attempts"),
        Query(_reported("octet_job_failures"), "failures"),
    ),
    panel(
        "Start",
        "From the placement of the last attempt to each phase of its start, and the wait for the slot before.",
        "s",
        Query(_by("phase", "octet_job_start_seconds"), "{{phase}}"),
        Query(_reported("octet_job_last_queue_wait_seconds"), "queue"),
        kind="bars",
    ),
    panel(
        "Seconds since the last step",
        "By rank. Minutes of it mean a rank that hangs.",
        "s",
        Query(f"time() - {_by('rank', 'octet_train_last_step_timestamp_seconds')}", "rank {{rank}}"),
    ),
    panel(
        "Seconds since the last report",
        "What the control plane goes by. It alerts after half a minute; the lease ends after a minute.",
        "s",
        Query(f"time() - {_reported('octet_job_last_report_timestamp_seconds')}", "last report"),
    ),
    is_collapsed=True,
)

_MEMORY = row(
    "Memory",
    panel(
        "Memory used",
        "In use, the most so far, and what there is, by rank: of the device on cuda, of the process on cpu.",
        "bytes",
        Query(_by("rank", "octet_memory_used_bytes"), "used, rank {{rank}}"),
        Query(_by("rank", "octet_memory_peak_bytes"), "peak, rank {{rank}}"),
        Query(_by("rank", "octet_memory_limit_bytes"), "limit, rank {{rank}}"),
        log=True,
        width=12,
    ),
    panel(
        "Share of the memory",
        "Of the rank that uses most of its own. Alerts above 95 %.",
        "percentunit",
        Query(f"max(job_id:octet_memory_used:ratio{_JOB})", "fullest rank"),
        width=12,
    ),
    is_collapsed=True,
)

_FP8 = row(
    "FP8 health",
    panel(
        "Overflow",
        "Share of elements clamped to the format's maximum, worst layer, by operand. Alerts above 0.1 %.",
        "percentunit",
        Query(f"max by (operand) (job_id:octet_fp8_overflow:ratio{_JOB})", "{{operand}}"),
    ),
    panel(
        "Underflow",
        "Share of non-zero elements that became zero, worst layer, by operand.",
        "percentunit",
        Query(_by("operand", "octet_fp8_underflow_ratio"), "{{operand}}"),
    ),
    panel(
        "Quantisation error",
        "Signal to noise, worst layer, by operand: 31.5 dB for E4M3 and 25.5 dB for E5M2 where nothing is out of range.",
        "dB",
        Query(f"min by (operand) (octet_fp8_sqnr_decibels{_JOB})", "{{operand}}"),
    ),
    panel(
        "Amax",
        "Largest magnitude over the layers, by operand.",
        "short",
        Query(_by("operand", "octet_fp8_amax"), "{{operand}}"),
        log=True,
    ),
    panel(
        "Scale",
        "Largest dequant_scale over the layers, by operand: value = codes × dequant_scale.",
        "short",
        Query(_by("operand", "octet_fp8_dequant_scale"), "{{operand}}"),
        log=True,
    ),
    panel(
        "Layers",
        "Linear layers in FP8, left as they were, filtered (bf16 is faster at their shapes), and demoted to bf16 since.",
        "short",
        Query(_by("state", "octet_layers"), "{{state}}"),
        kind="stacked",
    ),
    panel(
        "Load of experts",
        "Tokens of the expert that has fewest, and of that with most, over the mean, in the most uneven mixture. 1: all alike.",
        "short",
        Query(_by("expert", "octet_expert_load_ratio"), "{{expert}}"),
        needs="experts",
    ),
    is_collapsed=True,
)

_WIRE = row(
    "Wire and checkpoints",
    panel(
        "Bytes on the wire",
        "What all ranks together send each second, by collective and by the dtype that it travels in. None with one rank.",
        "Bps",
        Query(
            f"sum by (collective, dtype) (rate(octet_wire_sent_bytes_total{_JOB}{_RATE}))",
            "{{collective}} {{dtype}}",
        ),
        kind="stacked",
    ),
    panel(
        "Age of the last checkpoint",
        "And what it may be, from the spec and the step time. Alerts at three times that and five minutes.",
        "s",
        Query(f"time() - {_reported('octet_job_last_checkpoint_timestamp_seconds')}", "age"),
        Query(_reported("octet_job_checkpoint_interval_seconds"), "interval"),
        Query(f"time() - max(octet_checkpoint_last_success_timestamp_seconds{_JOB})", "age, by the rank"),
    ),
    panel(
        "Checkpoints",
        "Written by the present attempt, their size, and the step of the last.",
        "short",
        Query(f"sum(octet_checkpoints_total{_JOB})", "written"),
        Query(_reported("octet_job_last_checkpoint_step"), "last step"),
        Query(f"max(octet_checkpoint_bytes{_JOB}) / 1e6", "MB"),
    ),
    is_collapsed=True,
)

_GPU = row(
    "GPU",
    panel(
        "Share of the peak",
        "Model FLOP/s of the last step over the peak that the legend names, by rank.",
        "percentunit",
        Query(_by("rank, peak", "octet_train_flops_utilization_ratio"), "rank {{rank}} of {{peak}}"),
        needs="gpu",
    ),
    panel(
        "Power",
        "From NVML in the rank, and from DCGM where it runs on the same nodes.",
        "watt",
        Query(_by("rank", "octet_gpu_power_watts"), "rank {{rank}}"),
        needs="gpu",
    ),
    panel(
        "Clock of the multiprocessors",
        "From NVML in the rank. A drop under load is a power or temperature limit.",
        "hertz",
        Query(_by("rank", "octet_gpu_sm_clock_hertz"), "rank {{rank}}"),
        needs="gpu",
    ),
    panel(
        "Temperature",
        "From NVML in the rank.",
        "celsius",
        Query(_by("rank", "octet_gpu_temperature_celsius"), "rank {{rank}}"),
        needs="gpu",
    ),
    panel(
        "Busy",
        "Share of the last sample period in which a kernel ran, from NVML in the rank.",
        "percentunit",
        Query(_by("rank", "octet_gpu_utilization_ratio"), "rank {{rank}}"),
        needs="gpu",
    ),
    panel(
        "Tensor cores busy (DCGM)",
        "Of every GPU that a DCGM exporter watches; enable DCGM_FI_PROF_PIPE_TENSOR_ACTIVE there.",
        "percentunit",
        Query("max by (Hostname, gpu) (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE)", "{{Hostname}} GPU {{gpu}}"),
        needs="dcgm",
    ),
    panel(
        "Power (DCGM)",
        "Of every GPU that a DCGM exporter watches.",
        "watt",
        Query("max by (Hostname, gpu) (DCGM_FI_DEV_POWER_USAGE)", "{{Hostname}} GPU {{gpu}}"),
        needs="dcgm",
    ),
    panel(
        "Memory used (DCGM)",
        "Of every GPU that a DCGM exporter watches.",
        "mbytes",
        Query("max by (Hostname, gpu) (DCGM_FI_DEV_FB_USED)", "{{Hostname}} GPU {{gpu}}"),
        needs="dcgm",
    ),
    panel(
        "Errors (DCGM)",
        "The last XID error of every GPU that a DCGM exporter watches; zero is none.",
        "short",
        Query("max by (Hostname, gpu) (DCGM_FI_DEV_XID_ERRORS)", "{{Hostname}} GPU {{gpu}}"),
        needs="dcgm",
    ),
    is_collapsed=True,
)

BOARD = Board(
    uid="octet-job",
    title="Octet / Job",
    description="One job: learning, speed, memory, FP8 health, wire, checkpoints, GPU.",
    variables=(
        Variable(
            "job_id",
            "Job",
            'query_result(label_join(octet_job_info, "title", " ", "name", "level", "job_id"))',
            regex='/job_id="(?<value>[^"]+)".*title="(?<text>[^"]+)"/',
        ),
    ),
    annotations=(
        Annotation("Checkpoint", _changed("octet_job_last_checkpoint_step"), "blue"),
        Annotation("Attempt", _changed("octet_job_attempts"), "orange"),
        Annotation("Failure", f"({_changed('octet_job_failures')}) > 0", "red"),
        Annotation("Layer demoted", _changed("octet_layers", '{job_id="$job_id", state="demoted"}'), "purple"),
    ),
    rows=(_NOW, _LEARNING, _SPEED, _MEMORY, _FP8, _WIRE, _GPU),
)

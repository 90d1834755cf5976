"""Summaries of jobs as ranks send them, for tests of what is made of them."""

from typing import Any

from octet.api_schemas import JobSummary


def summary_of(loss: float, **changes: Any) -> JobSummary:
    """Return the summary of a job of 100 parameters that ended with this evaluation loss."""
    fields: dict[str, Any] = {
        "steps": 10,
        "final_loss": loss + 1,
        "evaluation_loss": loss,
        "evaluation_perplexity": 2.0,
        "tokens": 1000,
        "tokens_per_s": 100.0,
        "train_time_s": 10.0,
        "num_parameters": 100,
        "num_converted_parameters": 80,
        "memory_bytes": {"weights": 400, "gradients": 400},
        "converted_memory_bytes": {},
        "peak_memory_bytes": None,
        "data": {},
    }
    return JobSummary.model_validate(fields | changes)

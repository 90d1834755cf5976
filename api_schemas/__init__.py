"""The contracts of Octet: everything that crosses a boundary. Imports only pydantic and the standard library.

This is the one import path for other packages; `tests/api_schemas/test_surface.py` freezes it.
"""

from api_schemas.attempt import Attempt, Checkpoint, CheckpointFile, Event, LogLine, MetricPoint
from api_schemas.base import Contract, JsonScalar, Timestamp, refusal, rfc3339
from api_schemas.data import ANY_FILE, DataSpec, Files, Needs, SourceSpec, TextSpec, Unfit
from api_schemas.fit import misfit, tokens_per_sample
from api_schemas.inputs import ImageInput, Task, TokenInput
from api_schemas.job import Job, JobSpec, JobSummary, Progress, QueuePlace, RetrySpec, StartTimes, ValidatedJob
from api_schemas.launch import AttemptRef, CheckpointRef, LaunchOrder, PoolCapacity, Probe, ProbeState
from api_schemas.layout import AxisName, BatchDivision, Layout
from api_schemas.models import PRESETS, FamilySizes, FamilySpec, GPTSizes, GPTSpec, ModelSizes, ModelSpec
from api_schemas.optimization import OptimizerSpec, ScheduleSpec
from api_schemas.page import Page
from api_schemas.precision import PrecisionSpec
from api_schemas.problem import ErrorCode, Problem, Violation, explain, explain_details
from api_schemas.report import (
    MAX_REPORTS_PER_BATCH,
    CheckpointReport,
    EvaluationReport,
    EventReport,
    ExporterReport,
    FinishedReport,
    LogReport,
    PhaseReport,
    Report,
    ReportBatch,
    ReportBody,
    ReportReply,
    StartedReport,
    StepReport,
)
from api_schemas.resources import ParallelismSpec, Pool, PoolConfig, ResourceSpec
from api_schemas.states import AttemptState, Blame, DesiredState, FailureReason, JobState
from api_schemas.training import TrainingSpec

__all__ = [
    "ANY_FILE",
    "MAX_REPORTS_PER_BATCH",
    "PRESETS",
    "Attempt",
    "AttemptRef",
    "AttemptState",
    "AxisName",
    "BatchDivision",
    "Blame",
    "Checkpoint",
    "CheckpointFile",
    "CheckpointRef",
    "CheckpointReport",
    "Contract",
    "DataSpec",
    "DesiredState",
    "ErrorCode",
    "EvaluationReport",
    "Event",
    "EventReport",
    "ExporterReport",
    "FailureReason",
    "FamilySizes",
    "FamilySpec",
    "Files",
    "FinishedReport",
    "GPTSizes",
    "GPTSpec",
    "ImageInput",
    "Job",
    "JobSpec",
    "JobState",
    "JobSummary",
    "JsonScalar",
    "LaunchOrder",
    "Layout",
    "LogLine",
    "LogReport",
    "MetricPoint",
    "ModelSizes",
    "ModelSpec",
    "Needs",
    "OptimizerSpec",
    "Page",
    "ParallelismSpec",
    "PhaseReport",
    "Pool",
    "PoolCapacity",
    "PoolConfig",
    "PrecisionSpec",
    "Probe",
    "ProbeState",
    "Problem",
    "Progress",
    "QueuePlace",
    "Report",
    "ReportBatch",
    "ReportBody",
    "ReportReply",
    "ResourceSpec",
    "RetrySpec",
    "ScheduleSpec",
    "SourceSpec",
    "StartTimes",
    "StartedReport",
    "StepReport",
    "Task",
    "TextSpec",
    "Timestamp",
    "TokenInput",
    "TrainingSpec",
    "Unfit",
    "ValidatedJob",
    "Violation",
    "explain",
    "explain_details",
    "misfit",
    "refusal",
    "rfc3339",
    "tokens_per_sample",
]

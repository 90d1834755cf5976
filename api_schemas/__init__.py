"""The contracts of Octet: everything that crosses a boundary. Imports only pydantic and the standard library.

This is the one import path for other packages; `tests/api_schemas/test_surface.py` freezes it.
"""

if __name__ != "octet.api_schemas":
    raise ImportError("import octet.api_schemas, not api_schemas", name=__name__)


from octet.api_schemas.attempt import Attempt, Checkpoint, CheckpointFile, Event, LogLine, MetricPoint
from octet.api_schemas.base import Contract, JsonScalar, Page, SpecConflict, Timestamp, refusal, rfc3339
from octet.api_schemas.catalog import Alert
from octet.api_schemas.data import ANY_FILE, DataSpec, Files, Needs, SourceSpec, TextSpec
from octet.api_schemas.export import Export, ExportSpec
from octet.api_schemas.inputs import ImageInput, Task, TokenInput, tokens_per_sample
from octet.api_schemas.job import Job, JobChange, JobSpec, JobSummary, Progress, QueuePlace, RetrySpec, StartTimes, ValidatedJob
from octet.api_schemas.launch import AttemptRef, CheckpointRef, LaunchOrder, PoolCapacity, Probe, ProbeState
from octet.api_schemas.layout import AxisName, BatchDivision, Layout, ParallelismSpec
from octet.api_schemas.models import PRESETS, FamilySizes, FamilySpec, GPTSizes, GPTSpec, ModelSizes, ModelSpec
from octet.api_schemas.optimization import OptimizerSpec, ScheduleSpec
from octet.api_schemas.precision import PrecisionSpec
from octet.api_schemas.problem import ErrorCode, Problem, Violation, explain, explain_details
from octet.api_schemas.report import (
    MAX_REPORTS_PER_BATCH,
    CheckpointReport,
    EvaluationReport,
    EventReport,
    ExporterReport,
    ExportReport,
    FinishedReport,
    LogReport,
    MeasuredReport,
    PhaseReport,
    Report,
    ReportBatch,
    ReportBody,
    ReportReply,
    StartedReport,
    StepReport,
)
from octet.api_schemas.resources import Loop, Pool, PoolConfig, ResourceSpec
from octet.api_schemas.rules.table import check_data, check_schedule
from octet.api_schemas.states import AttemptState, Blame, DesiredState, FailureReason, JobState
from octet.api_schemas.training import AdapterSpec, TrainingSpec

__all__ = [
    "ANY_FILE",
    "MAX_REPORTS_PER_BATCH",
    "PRESETS",
    "AdapterSpec",
    "Alert",
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
    "Export",
    "ExportReport",
    "ExportSpec",
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
    "JobChange",
    "JobSpec",
    "JobState",
    "JobSummary",
    "JsonScalar",
    "LaunchOrder",
    "Layout",
    "LogLine",
    "LogReport",
    "Loop",
    "MeasuredReport",
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
    "SpecConflict",
    "StartTimes",
    "StartedReport",
    "StepReport",
    "Task",
    "TextSpec",
    "Timestamp",
    "TokenInput",
    "TrainingSpec",
    "ValidatedJob",
    "Violation",
    "check_data",
    "check_schedule",
    "explain",
    "explain_details",
    "refusal",
    "rfc3339",
    "tokens_per_sample",
]

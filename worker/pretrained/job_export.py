"""Export a job's checkpoints while it runs: what `export` in its spec asks for.

Rank 0 makes an export of the files of a checkpoint, on the CPU, whatever ranks have written them: one rank and several with
ZeRO, `tensor` or a pipeline write the same files. The folder gets its name when it is complete, and names its checkpoint by
hash; an attempt that finds it reports it again. With `export.target` it is also sent to an object store, its manifest last,
and is reported when all of it is there. An export that fails is an event, and training goes on.
"""

import hashlib
import importlib.util
import itertools
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from octet.api_schemas import (
    CheckpointRef,
    EvaluationReport,
    EventReport,
    ExportReport,
    ExportSpec,
    ReportBody,
    SpecConflict,
    TokenInput,
)
from octet.api_schemas.evaluation import HALF_WIDTH, EvaluationSpec
from octet.api_schemas.export import EXPORT_PROGRESS, MismatchCard
from octet.worker.checkpoint import BadCheckpoint, complete_in, load
from octet.worker.checkpoint.files import MANIFEST, WrittenFile, finish, sync
from octet.worker.common.config import TrainConfig
from octet.worker.common.errors import DataError, InvalidConfig, RankError, Stopped
from octet.worker.data import Source
from octet.worker.data.stores import StoreFolder
from octet.worker.pretrained.adapter import export_adapter, export_merged
from octet.worker.pretrained.calibrate import Calibration
from octet.worker.pretrained.compressed import Fp8Form
from octet.worker.pretrained.from_checkpoint import adapted, averaged, copy_settings, trained
from octet.worker.pretrained.mismatch import logits_of, measure, read_as_served
from octet.worker.pretrained.model_card import Facts, license_of, write_card
from octet.worker.pretrained.write import PLAIN_DTYPES, check_form, export
from octet.worker.reporting.reporter import Reporter, order_to_stop

VERSION = 1
PROGRESS_EVERY_S = 60.0
"""Seconds between events of an export that goes on. Without any, the server ends the attempt after its stall timeout."""
_UNFINISHED = ".unfinished_"

Tell = Callable[[ReportBody], None]

logger = logging.getLogger(__name__)


def check_export(config: TrainConfig, model: nn.Module) -> None:
    """Refuse a model that cannot be written in the form that a job's spec names. Raises InvalidConfig.

    model: converted, and whole: ranks have not divided it yet.
    """
    spec = config.spec.export
    if spec is None:
        return
    if spec.target is not None:
        try:
            StoreFolder(spec.target, config.readable_files.stores)
        except (DataError, SpecConflict) as error:
            raise InvalidConfig(str(error)) from None
    if config.spec.evaluation is not None:
        _check_tasks(config, config.spec.evaluation)
    if config.adapter is not None:
        return
    try:
        check_form(model, spec.format, form=_form_of(spec))
    except ValueError as error:
        raise InvalidConfig(f"export: {error}") from None


def _check_tasks(config: TrainConfig, evaluation: EvaluationSpec) -> None:
    """Open the tasks of an evaluation once, so that a mistake in them costs no training. Raises InvalidConfig."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InvalidConfig(
            "evaluation.suite: the environment of the ranks has no lm_eval; allowed: a suite that is installed there. Install "
            "octet-fp8[lm-eval] for the ranks, or remove evaluation"
        )
    from octet.worker.pretrained.tasks import open_tasks

    try:
        evaluation.check(config.model, config.data, config.readable_files)
        with TemporaryDirectory(prefix="octet-tasks-") as cache:
            open_tasks(evaluation, config.readable_files, Path(cache))
    except Exception as error:  # a task is code of a user's, and lm-eval raises whatever it stumbles over
        raise InvalidConfig(f"evaluation: {error}") from error


def _form_of(spec: ExportSpec) -> Fp8Form:
    return Fp8Form(spec.layout, spec.activations)


class TooFar(Exception):
    """An export is further from the trainer's evaluation than its spec allows."""


class JobExporter:
    """Exports the checkpoints of a job, one after the other, on the rank that writes manifests."""

    def __init__(
        self, config: TrainConfig, spec: ExportSpec, job_dir: Path, source: Source, reporter: Reporter, tell: Tell
    ) -> None:
        """reporter: has the orders to stop. tell: sends a report."""
        self._config, self._spec, self._source, self._reporter, self._tell = config, spec, source, reporter, tell
        self._checkpoints, self._folder, self._job_id = job_dir / "checkpoints", job_dir / "exports", job_dir.name
        self._form = _form_of(spec)
        self._pending: list[int] = []
        self._last_step = config.training.steps_for(source.num_train_samples)
        self._reported_at = 0.0
        self._is_last = False
        self.newest: MismatchCard | None = None
        """The card of the newest export."""
        self.scores: Mapping[str, float] = {}
        """The finite scores of the newest export that has any, by name."""

    def add_all(self, steps: Iterable[int]) -> None:
        """Take checkpoints that are complete, by their steps."""
        if self._spec.when == "every_checkpoint":
            self._pending += sorted(steps)

    def export_pending(self) -> None:
        """Export the checkpoints that were added, oldest first."""
        while self._pending:
            self._export(self._pending.pop(0))

    def finish(self, last_step: int, best_step: int | None) -> None:
        """Export what is left at the end of a run whose last checkpoint is complete. Any order to stop ends it."""
        self._is_last = True
        self.export_pending()
        if self._spec.when != "every_checkpoint":
            self._export(best_step if self._spec.when == "best" and best_step is not None else last_step)

    def _export(self, step: int) -> None:
        """Export a checkpoint, or find its export, and report it. Only an event says that it failed.

        Raises an order to stop that leaves no time, as when another attempt has taken over.
        """
        try:
            report, evaluation = self._exported(step)
        except Stopped:
            raise
        except Exception as error:
            message = f"the checkpoint of step {step} was not exported: {error}"
            logger.warning(message, exc_info=not isinstance(error, TooFar | RankError | BadCheckpoint))
            self._tell(EventReport(type="export.failed", message=message[:4096], data={"step": step}))
        else:
            self.newest = report.mismatch
            self._tell(report)
            if evaluation is not None:
                self._report_scores(evaluation)

    def _report_scores(self, evaluation: EvaluationReport) -> None:
        """Report the evaluation of a step again, now with its scores, and an event with these in words."""
        self._tell(evaluation)
        assert self._config.spec.evaluation is not None
        tasks = tuple(f"{name}_" for name in self._config.spec.evaluation.tasks)
        self.scores = {
            name: value for name, value in evaluation.metrics.items() if name.startswith(tasks) and value is not None
        }
        words = [
            f"{name} {value:.4g}" + (f" ± {self.scores[name + HALF_WIDTH]:.2g}" if name + HALF_WIDTH in self.scores else "")
            for name, value in self.scores.items()
            if not name.endswith(HALF_WIDTH)
        ]
        message = f"scores of step {evaluation.step}: {', '.join(words)}"
        self._tell(EventReport(type="job.evaluated", message=message[:4096], data={"step": evaluation.step}))

    def _exported(self, step: int) -> tuple[ExportReport, EvaluationReport | None]:
        ref = next((ref for ref in complete_in(self._checkpoints) if ref.step == step), None)
        if ref is None:
            raise BadCheckpoint(f"{self._checkpoints} has no complete checkpoint of step {step}")
        final = self._folder / f"{ref.name}_{self._spec.label}"
        report = self._sent(find_export(final, ref) or self._written(ref, final), final)
        scored = json.loads((final / MANIFEST).read_bytes()).get("evaluation")
        return report, None if scored is None else EvaluationReport.model_validate(scored)

    def _sent(self, report: ExportReport, folder: Path) -> ExportReport:
        """Send an export to the target, if the spec has one, and return its report with its address."""
        if self._spec.target is None:
            return report
        address = f"{self._spec.target}/{self._job_id}/{folder.name}"
        names = [*json.loads((folder / MANIFEST).read_bytes())["files"], MANIFEST]

        def before_each(num_sent: int) -> None:
            self._check_order()
            self._report_progress(report.step, f"{num_sent} of {len(names)} files are sent")

        StoreFolder(address, self._config.readable_files.stores).send(folder, names, before_each)
        return report.model_copy(update={"address": address})

    def _written(self, ref: CheckpointRef, final: Path) -> ExportReport:
        """Write an export, and give its folder its name when it is complete."""
        unfinished = self._folder / f"{_UNFINISHED}{final.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            with _own_random_numbers():
                card, evaluation = self._write(ref, unfinished)
            report = self._complete(ref, unfinished, final, card, evaluation)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return report

    def _write(self, ref: CheckpointRef, folder: Path) -> tuple[MismatchCard | None, EvaluationReport | None]:
        """Write everything but the manifest, compare what was written, and run tasks on it. Raises TooFar."""
        spec, files = self._spec, self._config.readable_files
        self._reported_at = time.monotonic()
        state = load(self._checkpoints, ref)
        self._report_progress(ref.step, "its checkpoint is read")
        job, dtype, card = state["job"], PLAIN_DTYPES.get(spec.format, torch.bfloat16), None
        if job.get("adapter") is None:
            model = averaged(state, trained(state, files))
            form = self._form
            if form.activations == "static":
                form = form._replace(input_scales=self._calibrated(model.eval(), ref.step))
            export(model.eval(), None, folder, format=spec.format, form=form)
        else:
            (export_merged if spec.merge else export_adapter)(job, state["model"], folder, dtype, files)
            if spec.compared_tokens or self._config.spec.evaluation is not None:
                model = adapted(state, files, self._config.training.start_change)
        self._report_progress(ref.step, "its files are written")
        if spec.compared_tokens:
            batches = self._batches(ref.step)
            card = measure(model.eval(), self._config.spec, folder, self._form, batches, spec.compared_tokens, files)
            _check_limit(card, spec.max_kl_divergence)
        copy_settings(job["model"], folder, files)
        facts = self._facts(ref.step, state, card)
        tasks = self._config.spec.evaluation
        if tasks is None or not (spec.when != "every_checkpoint" or tasks.is_due(ref.step, self._last_step)):
            write_card(folder, self._config.spec, facts)
            return card, None
        facts = facts._replace(evaluation={**facts.evaluation, **self._scores(tasks, model, folder, ref.step)})
        write_card(folder, self._config.spec, facts)
        values = {name: value if math.isfinite(value) else None for name, value in facts.evaluation.items()}
        return card, EvaluationReport(step=ref.step, loss=values.pop("loss", None), tokens=0, metrics=values)

    @torch.no_grad()
    def _scores(self, evaluation: EvaluationSpec, model: nn.Module, folder: Path, step: int) -> Mapping[str, float]:
        """Run tasks on what was written."""
        from octet.worker.pretrained.tasks import Served, run_tasks

        config, num_passes = self._config, itertools.count(1)

        def before_each() -> None:
            self._check_order()
            self._report_progress(step, f"{next(num_passes)} passes of its tasks are computed")

        _, _, as_server = read_as_served(model, config.spec, folder, self._form, config.readable_files)
        takes = config.sizes.takes
        longest = (takes.max_sequence_length if isinstance(takes, TokenInput) else None) or config.sequence_length
        tokenizer = evaluation.tokenizer_folder(config.model, config.data)
        served = Served(
            lambda tokens_T: as_server({"tokens": tokens_T[None]}), tokenizer, longest, config.readable_files, before_each
        )
        return run_tasks(evaluation, served, config.readable_files)

    def _complete(
        self, ref: CheckpointRef, unfinished: Path, final: Path, card: MismatchCard | None, scored: EvaluationReport | None
    ) -> ExportReport:
        """Sync and hash the files, write the manifest, and give the folder its name."""
        self._check_order()
        names = sorted(str(path.relative_to(unfinished)) for path in unfinished.rglob("*") if path.is_file())
        files = {name: finish(unfinished / name) for name in names}
        export_ = self._spec.model_dump(mode="json", include={"format", "layout", "activations"})
        export_ |= {"step": ref.step, "mismatch": None if card is None else card.model_dump(mode="json")}
        manifest = {"version": VERSION, "step": ref.step, "checkpoint": ref.sha256, "export": export_}
        manifest["evaluation"] = None if scored is None else scored.model_dump(mode="json")
        manifest["files"] = {name: file._asdict() for name, file in files.items()}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        for name in (MANIFEST, "."):
            sync(unfinished / name)
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        sync(self._folder)
        report = find_export(final, ref)
        assert report is not None, "it was written now"
        return report

    def _batches(self, step: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """The samples of an evaluation, one at a time, so that the logits of a few are in memory."""
        config = self._config
        most = config.eval_batches * config.batch.global_batch_size
        for number, batch in enumerate(self._source.evaluation_batches(1, most, 0, 1)):
            self._check_order()
            self._report_progress(step, f"{number} held-out samples are compared")
            yield batch

    @torch.no_grad()
    def _calibrated(self, model: nn.Module, step: int) -> Mapping[str, float]:
        """Find the scales of layers' inputs on samples that were trained on, from the first: held-out ones are for the card."""
        num_tokens = 0
        with Calibration(model) as calibration:
            for number in range(self._source.num_train_samples):
                self._check_order()
                self._report_progress(step, f"{number} samples are calibrated on")
                num_tokens += len(logits_of(model, self._source.train_batch(number, 1)))
                if num_tokens >= self._spec.calibration_tokens:
                    break
        return calibration.input_scales()

    def _report_progress(self, step: int, what: str) -> None:
        """Report once a minute that an export goes on, so that no server takes it for stalled."""
        if time.monotonic() - self._reported_at >= PROGRESS_EVERY_S:
            self._reported_at = time.monotonic()
            self._tell(EventReport(type=EXPORT_PROGRESS, message=f"exporting step {step}: {what}", data={"step": step}))

    def _check_order(self) -> None:
        """Raise an order to stop that leaves no time for a checkpoint, nor for this. After the last checkpoint any does."""
        stop = order_to_stop(self._reporter)
        if stop is not None and (self._is_last or not stop.saves):
            raise stop

    def _facts(self, step: int, state: Mapping[str, Any], card: MismatchCard | None) -> Facts:
        losses, evaluated = state["progress"]["recent_losses"], dict(state["progress"].get("evaluated", {}))
        evaluation = evaluated if evaluated.pop("step", None) == step else {}
        origin = self._config.model.files
        license_name = None if origin is None else license_of(Path(origin), self._config.readable_files)
        return Facts(step, losses[-1] if losses else None, evaluation, self._source.facts, license_name, card)


def find_export(folder: Path, ref: CheckpointRef) -> ExportReport | None:
    """Return the report of an export in a folder; None if there is none, or if it is of another checkpoint of the step."""
    try:
        content = (folder / MANIFEST).read_bytes()
        manifest = json.loads(content)
        if manifest["version"] != VERSION or manifest["checkpoint"] != ref.sha256:
            return None
        files = [WrittenFile(**file) for file in manifest["files"].values()]
        if any((folder / name).stat().st_size != file["num_bytes"] for name, file in manifest["files"].items()):
            return None
        num_bytes = sum(file.num_bytes for file in files) + len(content)
        sha256 = hashlib.sha256(content).hexdigest()
        return ExportReport.model_validate(manifest["export"] | {"name": folder.name, "num_bytes": num_bytes, "sha256": sha256})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_limit(card: MismatchCard, limit: float | None) -> None:
    found = card.evaluation.kl_divergence
    if limit is not None and not found <= limit:
        raise TooFar(
            f"its KL divergence from the trainer's evaluation is {found:.4g} nats per token; allowed: at most {limit:g}, "
            "export.max_kl_divergence. Raise it, or export in another format."
        )


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Leave the random numbers of training as they are, whatever building a network draws."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield

"""Check the files of a job's model and data as its ranks will read them, with the bounds of each source's contract.

It runs in a process with limits (`check_server`), so it imports the contracts and nothing of the database or of HTTP.
"""

import os
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple, NoReturn

from octet.api_schemas import DataSpec, FamilySizes, ImageInput, JobSpec, ModelSpec, Needs, SpecConflict, Violation, check_data
from octet.api_schemas.data.files import NEVER_READ, Files, outside_of_roots
from octet.api_schemas.evaluation import EvaluationSpec
from octet.service.errors import InvalidRequest

FILES_TO_READ = "files that the service can read"
UNKNOWN_VOCAB_SIZE = 1 << 32
"""The vocabulary of a model whose configuration does not say it: any data fits, and the rank checks."""


class Inputs(NamedTuple):
    """The inputs of a job, and how it reads them: all that the check of its files depends on."""

    model: ModelSpec
    data: DataSpec
    sequence_length: int
    evaluation: EvaluationSpec | None

    @property
    def key(self) -> Hashable:
        """Equal for jobs that have the same check: those of a sweep, for example."""
        try:
            hash(self)
        except TypeError:  # a model with options of any shape
            return object()
        return self


def inputs_of(spec: JobSpec) -> Inputs:
    """Return what a job reads."""
    return Inputs(spec.model, spec.data, spec.training.sequence_length, spec.evaluation)


def check_files(inputs: Inputs, files: Files) -> None:
    """Check the files of a job's model and data, which can take as long as a file system does."""
    takes, data = _checked_model(inputs, files).takes, inputs.data
    if inputs.evaluation is not None:
        _check_evaluation(inputs.evaluation, inputs, files)
    if data.is_stored:
        _check_stored(inputs, files)
        return
    path = _readable_path("data.path", data.path, files)
    if isinstance(takes, ImageInput):
        needs = Needs(inputs.sequence_length, 0, takes)
    else:
        needs = Needs(inputs.sequence_length, takes.vocab_size or UNKNOWN_VOCAB_SIZE)
    try:
        data.with_model(inputs.model.files).check(path, needs, files)
    except SpecConflict as conflict:
        refuse(conflict.field, conflict.got, conflict.allowed, conflict.change)
    except OSError as error:
        refuse("data.path", _name_in(error, path), FILES_TO_READ, f"{_words(error)}. Make it readable or exclude it.")


def _check_evaluation(evaluation: EvaluationSpec, inputs: Inputs, files: Files) -> None:
    """Look for the tasks and the tokenizer of an evaluation."""
    path = _readable_path("evaluation.path", evaluation.path, files)
    try:
        evaluation.check(inputs.model, inputs.data, files)
    except SpecConflict as conflict:
        refuse(conflict.field, conflict.got, conflict.allowed, conflict.change)
    except OSError as error:
        refuse("evaluation.path", _name_in(error, path), FILES_TO_READ, f"{_words(error)}. Make it readable.")


def _check_stored(inputs: Inputs, files: Files) -> None:
    """Compare the data's URL with the allowed prefixes, without a connection; ranks check what lies there."""
    data = inputs.data
    try:
        files.stores.require(data.path)
        data.with_model(inputs.model.files).check_local_parts(files)
    except SpecConflict as conflict:
        refuse(conflict.field, conflict.got, conflict.allowed, conflict.change)
    except OSError as error:
        refuse("data", _name_in(error, Path(data.path)), FILES_TO_READ, f"{_words(error)}. Make it readable.")


def _checked_model(inputs: Inputs, files: Files) -> FamilySizes:
    """Return the model's sizes, with what its files say, once they fit the data."""
    model = inputs.model
    if model.files is None:
        return model.sizes
    path = _readable_path("model.path", model.files, files)
    try:
        sizes = model.read_sizes(files)
        model.check_weights(files)
    except SpecConflict as conflict:
        refuse(conflict.field, conflict.got, conflict.allowed, conflict.change)
    except OSError as error:
        refuse("model.path", _name_in(error, path), FILES_TO_READ, f"{_words(error)}. Make it readable.")
    if found := check_data(sizes.takes, inputs.data, inputs.sequence_length):
        refuse(found.field, found.got, found.allowed, found.change)
    return sizes


def _readable_path(field: str, asked: str, files: Files) -> Path:
    """Resolve the links of a path. The refusal of a path outside the allowed folders does not say what is there."""
    try:
        path = Path(asked).resolve()
    except (OSError, RuntimeError) as error:
        refuse(field, asked, "a path that can be resolved", f"Change {field}: {_words(error)}.")
    roots = files.roots or ()
    if any(_is_inside(path, never) for never in NEVER_READ) or not any(_is_inside(path, root) for root in roots):
        conflict = outside_of_roots(field, asked, roots)
        refuse(conflict.field, conflict.got, conflict.allowed, conflict.change)
    try:
        is_there = path.is_file() or path.is_dir()
    except OSError as error:
        refuse(field, asked, "a path that can be read", f"Change {field}: {_words(error)}.")
    if not is_there:
        change = f"Nothing of that kind is there, though jobs may read in that place. Correct {field}, or put the data there."
        refuse(field, asked, "a file or folder that exists where the server runs", change)
    if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
        refuse(field, asked, "a path that the service can read", f"Change its permissions or {field}.")
    return path


def _is_inside(path: Path, folder: str) -> bool:
    """Return True for a resolved path that is the folder or below it."""
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _name_in(error: OSError, path: Path) -> str:
    return os.fsencode(error.filename or path).decode("utf-8", "backslashreplace")


def _words(error: OSError | RuntimeError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def refuse(field: str, got: str, allowed: str, change: str) -> NoReturn:
    """Raise InvalidRequest with one violation."""
    raise InvalidRequest.of((Violation(field=field, got=got, allowed=allowed, message=change),))

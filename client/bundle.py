"""Write what an issue report about a job needs into one archive, for `octet debug`, with secrets left out."""

import io
import json
import tarfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from octet.api_schemas import Job
from octet.client.api import Client
from octet.client.doctor import Checkup
from octet.client.redact import LEFT_OUT, Redactor

MOST_LOG_LINES = 20_000
"""The last ones; a job's logs may be gigabytes, and what went wrong stands at their end."""

_README = """\
{name} ({id}) is {state}. Written by octet debug {version}.

job.json          the job with its spec, state, reason and summary
attempts.json     its placements, and why each ended
events.jsonl      what happened to it, in order
checkpoints.json  its checkpoints: steps, sizes, hashes
curve.jsonl       every step
log.txt           the last {lines:,} lines of its ranks at most
checkup.json      octet doctor on the machine that wrote this, not on the one that trained

{count} values that are or look like secrets were left out; they read {left_out}. Names of machines, folders and people are
still here. Look through the files before you publish them.
"""


def write_bundle(client: Client, job: Job, checkup: Checkup, path: Path, redactor: Redactor) -> list[str]:
    """Write the archive and return the names of its files. Raises FileExistsError: no file is written over.

    redactor: everything passes through it.
    """
    texts = {
        "job.json": _document(job, redactor),
        "attempts.json": _documents(client.attempts(job.id), redactor),
        "events.jsonl": _lines(client.events(job.id), redactor),
        "checkpoints.json": _documents(client.checkpoints(job.id), redactor),
        "curve.jsonl": _lines(client.metrics(job.id), redactor),
        "log.txt": _log(client, job.id, redactor),
        "checkup.json": _document(checkup, redactor),
    }
    facts = {"name": job.name, "id": job.id, "state": job.state.value, "version": version("octet-fp8")}
    count = redactor.num_left_out
    texts["README.txt"] = _README.format(**facts, lines=MOST_LOG_LINES, count=count, left_out=LEFT_OUT)
    with path.open("xb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in texts.items():
            content = text.encode()
            entry = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{name}")
            entry.size, entry.mtime = len(content), int(time.time())
            archive.addfile(entry, io.BytesIO(content))
    return list(texts)


def _log(client: Client, job_id: str, redactor: Redactor) -> str:
    """Return the last lines as text. A private key may span several, so the whole is looked through at once."""
    kept = client.logs(job_id, tail=MOST_LOG_LINES)
    text = "".join(f"{line.at.isoformat()} rank {line.rank} {line.level} {line.message}\n" for line in kept)
    return redactor.text(text)


def _document(model: BaseModel, redactor: Redactor) -> str:
    return json.dumps(_redacted(model, redactor), indent=2) + "\n"


def _documents(models: Iterable[BaseModel], redactor: Redactor) -> str:
    return json.dumps([_redacted(model, redactor) for model in models], indent=2) + "\n"


def _lines(models: Iterable[BaseModel], redactor: Redactor) -> str:
    return "".join(json.dumps(_redacted(model, redactor)) + "\n" for model in models)


def _redacted(model: BaseModel, redactor: Redactor) -> Any:
    return redactor.document(model.model_dump(mode="json"))

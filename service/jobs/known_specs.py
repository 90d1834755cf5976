"""Reads the specs of submissions, and validates once what many of them share.

The jobs of a sweep differ in their names and their training. What else they ask for arrives in the same bytes, which were
validated with the first of them. The other two parts, and the rules that tie parts together, are checked for each job.
"""

from collections.abc import Mapping

import msgspec
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from api_schemas import JobSpec
from api_schemas.job import JobName
from api_schemas.training import TrainingSpec

_MOST_KNOWN = 256
_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAME: TypeAdapter[str] = TypeAdapter(JobName)
_OWN = {"name", "training"}


class KnownSpecs:
    """Reads specs, in one thread. `read` returns and raises what `JobSpec.model_validate_json` does."""

    def __init__(self) -> None:
        self._known: dict[frozenset[tuple[str, bytes]], JobSpec] = {}

    def read(self, body: bytes) -> JobSpec:
        """Read a spec. Raises ValidationError."""
        parts = _parts_of(body)
        if parts is None:
            return JobSpec.model_validate_json(body)
        shared = frozenset([part for part in parts.items() if part[0] not in _OWN])
        like = self._known.get(shared)
        if like is not None:
            return _with_own_parts(like, parts) or JobSpec.model_validate_json(body)
        spec = JobSpec.model_validate_json(body)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[shared] = spec
        return spec


def _parts_of(body: bytes) -> dict[str, bytes] | None:
    """Divide a spec into its fields. Returns None unless the body is these fields, each once, without any other spaces than
    those that JSON's writers put between fields: then nothing of it is left unread.
    """
    try:
        parts = {field: bytes(part) for field, part in _PARTS.decode(body).items()}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    pairs = [(field.encode(), part) for field, part in parts.items()]
    is_whole = parts.keys() >= _OWN and (
        body == b"{%b}" % b",".join([b'"%b":%b' % pair for pair in pairs])
        or body == b"{%b}" % b", ".join([b'"%b": %b' % pair for pair in pairs])
    )
    return parts if is_whole else None


def _with_own_parts(like: JobSpec, parts: Mapping[str, bytes]) -> JobSpec | None:
    """Return a spec that has a name and a training of its own, and all else as another; None if they are not valid."""
    try:
        own = {
            "name": _NAME.validate_json(parts["name"]),
            "training": TrainingSpec.model_validate_json(parts["training"]),
        }
        spec = like.model_copy(update=own)
        spec._check_parts()
    except (ValidationError, PydanticCustomError):
        return None
    return spec

"""Everything that the client raises.

OctetError
├── ApiError            the server refused; `problem` says what, got, allowed and what to change
├── UnexpectedAnswer    something answered that is not an Octet server, or not one of this version
├── ConnectionFailed    nothing answered at all
├── JobFileError        a job file that cannot be read, or a --set that cannot be applied to it
├── SpecRefused         a job file that is no valid job; `violations` are those the server would list
├── AmbiguousJob        a name, or the beginning of an id, that several jobs have
├── NoSuchJob           a name, or the beginning of an id, that no job has
├── SignInFailed        the identity provider did not sign somebody in, or what was stored of it is of no more use
├── WaitTimeout         the job was still alive when the caller's patience ended; it goes on
├── DownloadFailed      a file that arrived is not the one that the server lists
└── ServerFailed        the server that `octet demo` starts did not start, or ended early
"""

from collections.abc import Sequence

from octet.api_schemas import Job, Problem, Violation
from octet.api_schemas.problem import ErrorCode


class OctetError(Exception):
    """Base of all errors of the client; its text is meant for a person."""


class ApiError(OctetError):
    """The server answered with a problem document."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        count = f"{len(problem.errors)} field{'s' if len(problem.errors) > 1 else ''} to change"
        # The detail of a refused field has the same words as the field below.
        what = f"the server refuses it: {count}." if problem.errors else problem.detail
        lines = [f"{what} [{problem.code}]"]
        if problem.code is ErrorCode.UNAUTHENTICATED:
            lines.append("Set OCTET_API_KEY, or api_key in Python, to a key that this server has, or sign in: octet login")
        super().__init__("\n".join([*lines, *map(describe_violation, problem.errors)]))


class UnexpectedAnswer(OctetError):
    """The answer is not what the contract says."""


class ConnectionFailed(OctetError):
    """No answer from the server, however often it was asked."""

    def __init__(self, url: str, cause: str) -> None:
        self.url = url
        change = "Start one with `octet serve`, or name another with --url or OCTET_URL."
        if "CERTIFICATE_VERIFY_FAILED" in cause:
            change = (
                "Set OCTET_CA_FILE to a PEM file with the authority that issued its certificate, or correct the name in --url."
            )
        super().__init__(f"cannot reach an Octet server at {url}: {cause}.\n{change}")


class JobFileError(OctetError):
    """The file is not a document that could be a job."""


class SpecRefused(OctetError):
    """The document is not a valid job."""

    def __init__(self, source: str, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        count = f"{len(self.violations)} field{'s' if len(self.violations) > 1 else ''} to change"
        super().__init__("\n".join([f"{source} is not a valid job: {count}.", *map(describe_violation, violations)]))


class AmbiguousJob(OctetError):
    """Several jobs have the name, or an id that begins so."""

    def __init__(self, text: str, jobs: Sequence[Job], *, has_more: bool) -> None:
        self.jobs = tuple(jobs)
        lines = [f"  {job.id}  {job.name}  {job.state.value}" for job in jobs]
        heading = f"{text!r} is the name, or the beginning of the id, of several jobs. Give the id of one:"
        super().__init__("\n".join([heading, *lines, *(["  …"] if has_more else [])]))


class NoSuchJob(OctetError):
    """No job has the name, and none an id that begins so."""

    def __init__(self, text: str) -> None:
        super().__init__(f"there is no job {text!r}: it is no id, no beginning of one, and no name. List them with: octet list")


class SignInFailed(OctetError):
    """Somebody is not signed in, or not any more."""


class WaitTimeout(OctetError, TimeoutError):
    """The job is not over yet."""

    def __init__(self, job: Job, timeout_s: float) -> None:
        self.job = job
        super().__init__(f"{job.id} was still {job.state} after {timeout_s:g} s. It goes on; wait longer or cancel it.")


class DownloadFailed(OctetError):
    """The downloaded bytes do not have the expected SHA-256."""


class ServerFailed(OctetError):
    """The demo's own server failed; the text has the end of its log and the path of the log."""


def describe_violation(violation: Violation) -> str:
    """Describe the field, what was got, what is allowed and what to change, indented to stand under a heading."""
    allowed = [] if violation.allowed is None else [f"    allowed: {violation.allowed}"]
    lines = [f"  {violation.field or '(the whole document)'}", f"    got:     {violation.got}", *allowed]
    return "\n".join([*lines, f"    change:  {violation.message}"])

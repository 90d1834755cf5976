"""TLS of a server: its certificate, which is read again when its files are renewed, and the names that it is for.

Also what others need to trust it: the certificates of a PEM file, never a key that the same file may have.
"""

import logging
import os
import re
import ssl
import time
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_S = 10.0
"""A look takes two calls of stat, and happens where a connection begins."""
MOST_CA_BYTES = 1 << 20
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)

logger = logging.getLogger(__name__)


class Certificate:
    """The certificate and the key of a server, as files that may be renewed while it runs."""

    def __init__(self, certificate: Path, key: Path, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Read both. Raises ValueError, in one sentence, for files that are not there or do not belong together."""
        self._certificate, self._key = certificate, key
        self._clock_s = clock_s
        self._state = self._state_of_files()
        self._context = context_of(certificate, key)
        self._looked_at_s = clock_s()

    def context(self) -> ssl.SSLContext:
        """Return the context for a connection that begins now. Renewed files that cannot be used are logged, and not used."""
        if self._clock_s() - self._looked_at_s >= LOOK_EVERY_S:
            self._looked_at_s = self._clock_s()
            self._look()
        return self._context

    def _look(self) -> None:
        state = self._state_of_files()
        if state == self._state:
            return
        self._state = state
        try:
            self._context = context_of(self._certificate, self._key)
            logger.info("the TLS certificate %s was renewed", self._certificate)
        except ValueError as error:
            logger.error("connections go on with the former TLS certificate: %s", error)

    def _state_of_files(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_state_of, (self._certificate, self._key)))


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def context_of(certificate: Path, key: Path) -> ssl.SSLContext:
    """Make the context of a server: TLS 1.2 or later. Raises ValueError for files that cannot be used, with what to change."""
    for option, path in (("certificate", certificate), ("key", key)):
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise ValueError(
                f"the TLS {option} {str(path)!r} cannot be read: {error.strerror}. Name a PEM file with --tls-{option}"
            ) from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_refuse_passphrase)
    except ssl.SSLError as error:
        raise ValueError(_reason(certificate, key, error)) from error
    return context


def _refuse_passphrase() -> str:
    raise ValueError(
        "the TLS key has a passphrase, and nobody is asked for it; write it without: openssl pkey -in KEY -out NEW"
    )


def _reason(certificate: Path, key: Path, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"the TLS key {str(key)!r} is not that of the certificate {str(certificate)!r}; name files of one pair"
    if not _CERTIFICATE.search(certificate.read_text(encoding="utf-8", errors="replace")):
        return f"the TLS certificate {str(certificate)!r} has no PEM certificate; it begins with -----BEGIN CERTIFICATE-----"
    return (
        f"the TLS certificate {str(certificate)!r} and the key {str(key)!r} cannot be used: {error.reason or error}. Both are "
        "PEM, the certificate first and those that issued it after it"
    )


def certificates_in(path: Path) -> str:
    """Return the certificates of a PEM file and nothing else of it. Raises ValueError if it has none or is too large."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_CA_BYTES + 1)
    except OSError as error:
        raise ValueError(f"the file of certificates {str(path)!r} cannot be read: {error.strerror}") from error
    found = _CERTIFICATE.findall(content.decode("ascii", errors="replace"))
    if not found or len(content) > MOST_CA_BYTES:
        has = f"more than {MOST_CA_BYTES} bytes" if found else "no PEM certificate"
        raise ValueError(f"the file of certificates {str(path)!r} has {has}; name one with those of your authority")
    return "\n".join([*found, ""])


def name_in(certificate: Path, wanted: str) -> str:
    """Return the name by which a client checks a certificate: the wanted one if it is for that, else the first it is for.

    Raises ValueError for a certificate that is for no name.
    """
    from cryptography import x509  # only servers with TLS load it

    first = x509.load_pem_x509_certificate(certificates_in(certificate).encode())
    try:
        names = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    if not hosts:
        raise ValueError(
            f"the TLS certificate {str(certificate)!r} is for no name: it has no subjectAltName, and no client accepts it"
        )
    return wanted if wanted in hosts else hosts[0].replace("*", "octet", 1)


def trusting(ca_file: Path | None) -> ssl.SSLContext:
    """Make the context of a client that trusts the authorities of a file; by default those of the system."""
    return ssl.create_default_context(cadata=certificates_in(ca_file) if ca_file else None)

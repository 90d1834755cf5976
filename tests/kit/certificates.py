"""Certificates as companies have them: an authority of one's own, and certificates that it issues."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and of its key."""

    certificate: Path
    key: Path


class Authority:
    """An authority whose certificate is in `file`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = _builder(self._name, self._name, self._key)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, *hosts: str, name: str = "server") -> Pair:
        """Issue a certificate for hosts into two files, which may have been another certificate's before."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(host) if host[0].isalpha() else x509.IPAddress(ipaddress.ip_address(host)) for host in hosts]
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = _builder(subject, self._name, key)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(pem_of(key))
        return pair


def pem_of(key: ec.EllipticCurvePrivateKey, passphrase: bytes | None = None) -> bytes:
    """Return a key as PEM."""
    encryption = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(hours=1))
    return builder.not_valid_after(now + timedelta(days=1))

"""Everything an operator can set. It is read once at the start, from arguments and OCTET_* variables, and checked at once.

Settings that are unsafe or cannot work are refused with what to change, before anything runs.
"""

import hashlib
import ipaddress
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

import yaml
from pydantic import AnyHttpUrl, Field, SecretStr, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from octet.api_schemas import Files, PoolConfig
from octet.api_schemas.data.stores import DEFAULT_CACHE_BYTES, StoreAccess
from octet.api_schemas.keys import DEFAULT_TENANT, TENANT, KeyRole
from octet.api_schemas.quotas import Quotas
from octet.api_schemas.resources import RankUser
from octet.api_schemas.tracking import TrackersSpec
from octet.service import tls
from octet.service.logs import LogFormat

SHORTEST_API_KEY = 16
RUNBOOKS = "docs/operations.md"
"""The document in the repository that has a section for each alert."""
Seconds = Annotated[float, Field(gt=0, le=86_400)]


def default_pool(slots: int = 2) -> PoolConfig:
    """Build the pool `cpu` of a machine without configuration: `slots` ranks that share the processors."""
    threads = max(1, (os.cpu_count() or 1) // slots)
    return PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=slots, threads_per_worker=threads)


class Settings(BaseSettings):
    """The settings of one process, frozen. In variables, folders are separated like PATH, and keys by commas."""

    model_config = SettingsConfigDict(env_prefix="OCTET_", frozen=True, extra="forbid", hide_input_in_errors=True)

    data_dir: Path = Path("octet-data")
    database_url: str = Field(default="", repr=False, description="sqlite:///… or postgresql://…; default: a file in data_dir")
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65_535)
    internal_address: str = Field(
        default="",
        description="HOST:PORT of a listener of its own for reports of ranks, health and metrics, the only one of octet "
        "ingest; default: places on the port above are reserved for them",
    )
    report_url: str = Field(default="", description="base URL of this service as the workers reach it")

    log_format: LogFormat = Field(default="text", description="text, or json: one object a line, for what collects logs")
    tls_certificate: Path | None = Field(default=None, description="PEM: the server's certificate, then those that issued it")
    tls_key: Path | None = Field(default=None, description="PEM: its key, without a passphrase")
    ca_file: Path | None = Field(
        default=None,
        description="PEM: authorities that this service and its ranks trust in https://…; default: those of the system",
    )

    runbooks_url: str = Field(default=RUNBOOKS, description="http(s)://… where people read that document; alerts link to it")

    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    api_keys_file: Path | None = Field(default=None, description="a line for each: KEY, or TENANT:KEY; # starts a comment")

    oidc_issuer: str = Field(
        default="", description="https://… of the identity provider whose tokens are accepted; default: none"
    )
    oidc_audience: str = Field(default="", description="the audience that a token has to be for, its claim aud")
    oidc_client_id: str = Field(default="", description="of the public client of `octet login`; default: the audience")
    oidc_scopes: str = Field(default="openid profile email offline_access", description="that `octet login` asks for")
    oidc_claim: str = Field(default="groups", min_length=1, description="the claim that decides what a person may do")
    oidc_roles: dict[str, str] = Field(
        default={},
        description='role in a tenant by a value of that claim, as JSON: {"ml-ops": "default:admin", "*": "default:viewer"}; '
        "the first that a person has decides, and * is everyone",
    )

    data_roots: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(), description="folders a job may read; on loopback the default is the whole file system"
    )
    data_stores: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="URLs in object stores, by commas; a job may read them and what lies below; default: none"
    )
    export_stores: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="URLs in object stores, by commas; a job may export to them and below; default: none"
    )
    data_cache_dir: Path | None = Field(
        default=None, description="folder on each node for what was read from object stores; default: data-cache in data_dir"
    )
    data_cache_bytes: int = Field(default=DEFAULT_CACHE_BYTES, ge=0, description="most bytes in data_cache_dir of a node")
    pools: tuple[PoolConfig, ...] = Field(default_factory=lambda: (default_pool(),))
    pools_file: Path | None = Field(default=None, description="YAML: a list of pools, or a mapping with key 'pools'")

    quotas: Quotas = Quotas()
    quotas_file: Path | None = Field(
        default=None, description="YAML: the priorities that roles may ask for, and tenants' quotas"
    )

    free_space_bytes: int = Field(
        default=1 << 30, ge=0, description="a job that found the disk full starts again once this much is free in data_dir"
    )

    trackers: TrackersSpec = Field(
        default=TrackersSpec(), description='trackers of every job, as JSON: {"mlflow": {"online": true}}'
    )

    planner: bool = Field(
        default=True, description="trace the peaks of plans in a process with torch, 0.7 GB from the first plan on"
    )
    data_check_timeout_s: Seconds = Field(default=10, description="longest check of a job's data at submission")
    data_check_max_entries: int = Field(
        default=200_000, ge=1, description="most files and folders below data.path that are looked at at submission"
    )

    max_connections: int = Field(default=4096, ge=16, description="open HTTP connections, if the system allows that many files")
    max_connections_per_address: int = Field(
        default=256,
        ge=0,
        description="open HTTP connections of one address, 3/4 of them event streams; 0 for no limit, as behind a proxy",
    )
    requests_per_s: float = Field(
        default=2000,
        ge=0,
        description="requests of one API key each second, and twice as many at once; 0 for no limit. A list counts as 5, "
        "each KiB of a body from the fifth on as 1, and each mistake that the answer explains as 0.3",
    )
    request_head_timeout_s: Seconds = Field(default=10, description="for the head of a request, from the connection on")
    request_body_timeout_s: Seconds = Field(default=30, description="for the whole body of a request")
    answer_stall_timeout_s: Seconds = Field(default=30, description="for a client that does not read its answer")

    warm_idle_s: float = Field(
        default=3600, ge=0, le=86_400, description="how long an unused node keeps torch imported for further ranks; 0: never"
    )

    lease_s: Seconds = 60
    lease_grace_s: Seconds = 15
    heartbeat_s: Seconds = 2
    launch_timeout_s: Seconds = 120
    start_timeout_s: Seconds = 300
    stall_timeout_s: Seconds = 1800
    cancel_grace_s: Seconds = 20
    save_grace_s: Seconds = Field(default=600, description="for workers that save a checkpoint before they stop")
    elastic_grow_after_s: Seconds = Field(default=60, description="how long slots are free before an elastic job takes them")

    @field_validator("api_keys", "data_stores", "export_stores", mode="before")
    @classmethod
    def _parts_by_comma(cls, value: Any) -> Any:
        return tuple(key.strip() for key in value.split(",") if key.strip()) if isinstance(value, str) else value

    @field_validator("data_roots", mode="before")
    @classmethod
    def _folders_like_path(cls, value: Any) -> Any:
        return tuple(part for part in value.split(os.pathsep) if part) if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _read_files(cls, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("pools_file"):
            values["pools"] = _pools_of(Path(values["pools_file"]))
        if values.get("quotas_file"):
            values["quotas"] = _quotas_of(Path(values["quotas_file"]))
        if values.get("api_keys_file"):
            values["api_keys"] = (*_keys_of(Path(values["api_keys_file"])), *cls._parts_by_comma(values.get("api_keys", ())))
        return values

    @model_validator(mode="after")
    def _safe_and_consistent(self) -> Self:
        for entry in self.api_keys:
            _check_key(*_tenant_and_key(entry))
        if not self.is_loopback and not self.api_keys:
            raise ValueError(
                f"host {self.host!r} can be reached from other machines and no API key is configured; set OCTET_API_KEYS "
                "or OCTET_API_KEYS_FILE (octet serve --api-key-file), or serve on 127.0.0.1"
            )
        if self.internal_address:
            self._check_internal_address()
        if not self.is_loopback and not self.data_roots:
            raise ValueError(
                f"host {self.host!r} can be reached from other machines; set OCTET_DATA_ROOTS (octet serve --data-root) "
                "to the folders jobs may read"
            )
        if self.runbooks_url != RUNBOOKS and not re.fullmatch(r"https?://[^#\s]+", self.runbooks_url):
            raise ValueError(
                f"runbooks_url is {self.runbooks_url!r}; allowed: http(s)://…, without a fragment. Set OCTET_RUNBOOKS_URL to "
                "the address at which docs/operations.md can be read, or leave it out"
            )
        if self.report_url:
            AnyHttpUrl(self.report_url)
        self._check_tls()
        self._check_oidc()
        _ = self.store_access  # refuses a prefix that is not a URL
        _check_pools(self.pools)
        if self.has_users and not self.warm_idle_s:
            raise ValueError(
                "a pool runs the ranks of tenants as users of their own, who get a process that was forked for them, and "
                "warm_idle_s is 0; set OCTET_WARM_IDLE_S to seconds, or remove tenants.….user from the pool"
            )
        if self.heartbeat_s * 3 > self.lease_s:
            raise ValueError(f"heartbeat_s {self.heartbeat_s} must be at most a third of lease_s {self.lease_s}")
        _check_folder(self.data_dir)
        return self

    def _check_internal_address(self) -> None:
        host, port = host_and_port(self.internal_address)
        if port == self.port != 0:
            raise ValueError(
                f"internal_address is {self.internal_address!r}, the port of the API too; choose another for one of them"
            )
        if not names_loopback(host) and not self.api_keys:
            raise ValueError(
                f"internal_address {self.internal_address!r} can be reached from other machines and no API key is configured; "
                "set OCTET_API_KEYS or OCTET_API_KEYS_FILE, or choose an address of 127.0.0.1"
            )

    def _check_tls(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_certificate"
            raise ValueError(
                f"TLS needs a certificate and its key; set {missing} too (octet serve --{missing.replace('_', '-')})"
            )
        if self.tls_certificate is not None and self.tls_key is not None:
            tls.context_of(self.tls_certificate, self.tls_key)
            tls.name_in(self.tls_certificate, "")
        if self.ca_file is not None:
            tls.certificates_in(self.ca_file)

    def _check_oidc(self) -> None:
        if not self.oidc_issuer:
            names = ("oidc_audience", "oidc_client_id", "oidc_roles")
            given = [f"OCTET_{name.upper()}" for name in names if getattr(self, name)]
            if given:
                raise ValueError(f"{given[0]} is of no use without an identity provider; set OCTET_OIDC_ISSUER too")
            return
        if not is_safe_url(self.oidc_issuer):
            raise ValueError(f"oidc_issuer is {self.oidc_issuer!r}; allowed: https://…, or http:// of this machine")
        if not self.oidc_audience:
            raise ValueError("tokens of any client of the identity provider would be accepted; set OCTET_OIDC_AUDIENCE too")
        if not self.role_by_claim:
            raise ValueError(
                f"no value of the claim {self.oidc_claim!r} has a role, so nobody who signs in may do anything; set "
                'OCTET_OIDC_ROLES, for example {"ml-ops": "default:admin", "*": "default:viewer"}'
            )

    @property
    def role_by_claim(self) -> dict[str, tuple[str, KeyRole]]:
        """The tenant and the role that a value of the claim stands for, in the operator's order."""
        return {value: _tenant_and_role(value, text) for value, text in self.oidc_roles.items()}

    @property
    def has_users(self) -> bool:
        """True if a pool runs ranks of some tenants as users of their own."""
        return any(pool.has_users for pool in self.pools)

    @property
    def scheme(self) -> str:
        """The scheme of this server's URLs."""
        return "http" if self.tls_certificate is None else "https"

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the service."""
        return names_loopback(self.host)

    @cached_property
    def is_for_this_machine(self) -> bool:
        """True if the service has no keys, and serves only this machine."""
        return self.is_loopback and not self.api_keys

    @cached_property
    def tenants_by_key_hash(self) -> tuple[tuple[bytes, str], ...]:
        """The SHA-256 of each API key with its tenant."""
        keys = [_tenant_and_key(entry) for entry in self.api_keys]
        return tuple((hashlib.sha256(key.encode()).digest(), tenant) for tenant, key in keys)

    @property
    def named_roots(self) -> tuple[Path, ...]:
        """The folders jobs may read, as they are configured. A name may be a link, and lead elsewhere on another node."""
        return self.data_roots or (Path("/"),)

    @property
    def readable_roots(self) -> tuple[Path, ...]:
        """The folders jobs may read, with symbolic links resolved."""
        return tuple(root.resolve() for root in self.named_roots)

    @property
    def readable_files(self) -> Files:
        """The files that a submission may look at, within the limits of a check."""
        roots = tuple(map(str, self.readable_roots))
        stores = StoreAccess(prefixes=self.data_stores, export_prefixes=self.export_stores)  # nothing of them is read or kept
        return Files(roots, self.data_check_max_entries, self.data_check_timeout_s, stores)

    @property
    def store_access(self) -> StoreAccess:
        """The prefixes of object stores that ranks may read and export to, and the folder that they keep what they read in."""
        folder = str((self.data_cache_dir or self.data_dir / "data-cache").resolve())
        return StoreAccess(
            prefixes=self.data_stores,
            export_prefixes=self.export_stores,
            cache_folder=folder,
            cache_bytes=self.data_cache_bytes,
        )

    def store_access_of(self, user: RankUser | None) -> StoreAccess:
        """Do the same for the ranks of a user, who has a folder of its own."""
        access = self.store_access
        return access if user is None else access.model_copy(update={"cache_folder": f"{access.cache_folder}-{user.uid}"})

    @property
    def effective_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir.resolve() / 'octet.db'}"

    @property
    def effective_report_url(self) -> str:
        if self.report_url:
            return self.report_url.rstrip("/")
        host, port = host_and_port(self.internal_address) if self.internal_address else (self.host, self.port)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # a server on every address answers on loopback too
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def report_ca(self) -> str | None:
        """The certificates that ranks trust in the report URL, as PEM; None for those of their system.

        Ranks of a server's own machine also trust the certificate that it serves with, whoever has issued it.
        """
        if not self.effective_report_url.startswith("https:"):
            return None
        own = self.tls_certificate if not self.report_url else None
        return "".join(tls.certificates_in(file) for file in (self.ca_file, own) if file is not None) or None

    @property
    def report_name(self) -> str | None:
        """The name that the certificate of the report URL is checked for, where it is another one than the URL's host."""
        if self.tls_certificate is None or self.report_url:
            return None
        host = urlsplit(self.effective_report_url).hostname or ""
        name = tls.name_in(self.tls_certificate, host)
        return None if name == host else name

    @property
    def slot_hour_prices(self) -> dict[str, float]:
        """The price of a slot hour, by pool, of the pools that have one."""
        return {pool.name: pool.slot_hour_price for pool in self.pools if pool.slot_hour_price is not None}

    def pool(self, name: str) -> PoolConfig | None:
        return next((pool for pool in self.pools if pool.name == name), None)

    def job_dir(self, job_id: str) -> Path:
        """The folder of a job's checkpoints and spools. `job_id` must be one of ours: it becomes part of a path."""
        return self.data_dir.resolve() / "jobs" / job_id


def _document_of(name: str, path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{name} {str(path)!r} cannot be read as YAML: {error}") from error


def _quotas_of(path: Path) -> Quotas:
    try:
        return Quotas.model_validate(_document_of("quotas_file", path) or {})
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, detail['loc']))}: {detail['msg'].removeprefix('Value error, ')}" for detail in error.errors()
        )
        raise ValueError(f"quotas_file {str(path)!r} has no quotas: {problems}") from error


def _pools_of(path: Path) -> tuple[PoolConfig, ...]:
    document = _document_of("pools_file", path)
    pools = document.get("pools") if isinstance(document, dict) else document
    try:
        return TypeAdapter(tuple[PoolConfig, ...]).validate_python(pools)
    except ValidationError as error:
        problems = "; ".join(_problem_of_pool(detail) for detail in error.errors())
        raise ValueError(f"pools_file {str(path)!r} is no list of pools: {problems}") from error


def _problem_of_pool(detail: ErrorDetails) -> str:
    """Say what is wrong with one pool of a file, counted from 1."""
    number, *field = detail["loc"] or ("",)
    pool = f"pool {number + 1}" if isinstance(number, int) else "the file"
    name = ".".join(map(str, field))
    match detail["type"]:
        case "missing":
            return f"{pool} has no {name}; add it"
        case "extra_forbidden":
            return f"{pool} has the unknown field {name}; allowed: {', '.join(PoolConfig.model_fields)}"
    return f"{pool}{f', {name}' if name else ''}: {detail['msg'].removeprefix('Value error, ')}"


def _keys_of(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"api_keys_file {str(path)!r} cannot be read: {error}") from error
    return tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _tenant_and_key(entry: SecretStr) -> tuple[str, str]:
    """Split `TENANT:KEY`. A key alone belongs to the default tenant."""
    tenant, colon, key = entry.get_secret_value().partition(":")
    return (tenant, key.strip()) if colon else (DEFAULT_TENANT, tenant)


def host_and_port(address: str) -> tuple[str, int]:
    """Split HOST:PORT, an IPv6 host in brackets. Raises ValueError for any other form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"an address to listen on is HOST:PORT, for example 127.0.0.1:9464; got {address!r}")
    return host.strip("[]"), int(port)


def _tenant_and_role(value: str, text: str) -> tuple[str, KeyRole]:
    tenant, _, role = text.partition(":")
    if not re.fullmatch(TENANT, tenant) or role not in set(KeyRole):
        raise ValueError(
            f"oidc_roles has {text!r} for {value!r}; allowed: TENANT:ROLE, a tenant of up to 32 of a-z, 0-9 and -, and one of "
            f"{', '.join(KeyRole)}"
        )
    return tenant, KeyRole(role)


def is_safe_url(url: str) -> bool:
    """Return True for https, and for http within this machine: what comes from there decides who may do what."""
    parts = urlsplit(url)
    is_there = parts.hostname is not None and not parts.query and not parts.fragment
    return is_there and (parts.scheme == "https" or (parts.scheme == "http" and names_loopback(parts.hostname or "")))


def names_loopback(host: str) -> bool:
    """Return True if a host is this machine for sure."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_key(tenant: str, key: str) -> None:
    if len(key) < SHORTEST_API_KEY:
        raise ValueError(f"an API key has fewer than {SHORTEST_API_KEY} characters; use a longer one")
    if not re.fullmatch(TENANT, tenant):
        raise ValueError(
            "the tenant's name before the colon of an API key is not allowed; allowed: up to 32 of a-z, 0-9 and -, not "
            "starting with -. Write TENANT:KEY, or a key without a colon"
        )


def _check_pools(pools: tuple[PoolConfig, ...]) -> None:
    names = [pool.name for pool in pools]
    if not names:
        raise ValueError("no pool is configured; name at least one in OCTET_POOLS_FILE")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"pool names must differ; got twice: {', '.join(twice)}")


def _check_folder(folder: Path) -> None:
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"data_dir {str(folder)!r} cannot be used: {str(existing)!r} is not a folder we can write to")

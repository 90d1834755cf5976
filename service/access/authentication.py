"""Authentication: the principal of a request by its API key, from the settings or from the database, or by a token.

A key of the database is remembered for half a second, so one that is revoked, in whichever process, is refused within a second.
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from octet.api_schemas.keys import SECRET_PREFIX
from octet.service import store
from octet.service.access.principal import Principal, of_key_file, of_role, operator
from octet.service.access.tokens import Tokens, is_current, is_token
from octet.service.db.engine import Database
from octet.service.db.group_commit import GroupCommit
from octet.service.errors import Unauthenticated
from octet.service.settings import Settings

REMEMBERED_S = 0.5
USE_WRITTEN_EVERY = timedelta(minutes=1)
_KEYS_REMEMBERED = 10_000
_THREADS = 4
_ON_THIS_MACHINE = operator("a user of this machine")

logger = logging.getLogger(__name__)


class Authentication:
    """The API keys that one process accepts. Look-ups have threads of their own: other readers cannot keep them waiting."""

    def __init__(self, settings: Settings, database: Database, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._of_settings = [(key_hash, of_key_file(tenant)) for key_hash, tenant in settings.tenants_by_key_hash]
        self._database = database
        self._clock_s = clock_s
        self._remembered: dict[bytes, tuple[Principal, float]] = {}
        self._threads = CapacityLimiter(_THREADS)
        self._tokens = Tokens(settings) if settings.oidc_issuer else None
        self._uses = GroupCommit[str, None]("octet-key-uses", self._write_uses)

    async def authenticate(self, authorization: str) -> Principal:
        """Return the principal that an Authorization header stands for. Without configured keys loopback is the operator.

        Raises Unauthenticated for a missing or unknown key or token, and for one that has expired or was revoked; with a token
        also what `Tokens.verify` raises.
        """
        scheme, _, key = authorization.partition(" ")
        is_key = scheme.lower() == "bearer" and bool(key)
        key_hash = hash_of(key)
        if is_key and key.startswith(SECRET_PREFIX):
            found = await self._find_stored(key_hash)
            if found is not None:
                return found
        elif self._tokens is not None and is_key and is_token(key) and self._find_in_settings(key_hash) is None:
            return await self._tokens.verify(key)
        elif not self._of_settings:
            return _ON_THIS_MACHINE
        if not is_key:
            raise Unauthenticated("an API key is needed: send 'Authorization: Bearer <key>'")
        found = self._find_in_settings(key_hash)
        if found is None:
            raise Unauthenticated("the API key is not known here, or it has expired or was revoked")
        return found

    async def is_current(self, principal: Principal) -> bool:
        """Return False once the key of a principal was revoked or has expired, or its token has."""
        if principal.key_hash is None:
            return is_current(principal)
        return await self._find_stored(principal.key_hash) is not None

    def forget(self) -> None:
        """Look every key up again at its next use."""
        self._remembered.clear()

    def drain(self) -> None:
        """Wait until every last use is written."""
        self._uses.drain()

    async def close(self) -> None:
        """End what is being asked of the identity provider."""
        if self._tokens is not None:
            await self._tokens.close()

    def _find_in_settings(self, key_hash: bytes) -> Principal | None:
        # Compares every key: the time tells an attacker nothing.
        matches = [principal for known, principal in self._of_settings if hmac.compare_digest(key_hash, known)]
        return matches[0] if matches else None

    async def _find_stored(self, key_hash: bytes) -> Principal | None:
        found, until_s = self._remembered.get(key_hash, (None, 0.0))
        if found is not None and self._clock_s() < until_s:
            return found
        return await run_sync(self._look_up, key_hash, limiter=self._threads)

    def _look_up(self, key_hash: bytes) -> Principal | None:
        until_s = self._clock_s() + REMEMBERED_S  # from before the database is read
        with self._database.read() as session:
            now = self._database.now(session)
            row = store.keys.find_valid(session, key_hash, now)
            if row is None:
                self._remembered.pop(key_hash, None)
                return None
            found = of_role(f"{row.name} ({row.id})", row.tenant, row.role, key_hash=key_hash)
            is_use_due = row.used_at is None or now - row.used_at >= USE_WRITTEN_EVERY
            key_id = row.id
        while len(self._remembered) >= _KEYS_REMEMBERED:
            self._remembered.pop(next(iter(self._remembered)), None)
        self._remembered[key_hash] = found, until_s
        if is_use_due:
            # Nobody waits for it, so a database that is locked for writers holds no reader up.
            self._uses.submit(key_id).add_done_callback(_log_failure)
        return found

    def _write_uses(self, key_ids: Sequence[str]) -> list[None]:
        with self._database.write() as session:
            now = self._database.now(session)
            store.keys.note_uses(session, set(key_ids), now, now - USE_WRITTEN_EVERY)
        return [None] * len(key_ids)


def hash_of(secret: str) -> bytes:
    """Return what is stored of a secret. One of 256 random bits needs no slow hash: it cannot be guessed."""
    return hashlib.sha256(secret.encode()).digest()


def _log_failure(done: "Future[None]") -> None:
    if (error := done.exception()) is not None:
        logger.warning("the last use of a key was not stored: %s", error)

"""Tokens of people: JWTs of the operator's identity provider, any that has an OpenID Connect discovery document.

Nothing here waits for the provider on the event loop, and nobody can make this process ask it more often than every ten
seconds. Its keys are asked for again every five minutes, and at once for a token that is signed by an unknown one; while the
provider is away the keys are good for an hour. A token that was verified is remembered for a minute, which spares its
signature: a key that the provider takes back is refused about six minutes later, and an expired token at once.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import jwt

from octet.service import tls
from octet.service.access.principal import Principal, of_role
from octet.service.errors import Forbidden, NotReady, Unauthenticated
from octet.service.settings import Settings, is_safe_url, names_loopback

ALGORITHMS = ("RS256", "ES256")
LEEWAY_S = 30
REMEMBERED_S = 60.0
REFRESHED_EVERY_S = 300.0
ASKED_AT_MOST_EVERY_S = 10.0
GOOD_FOR_S = 3600.0
FETCH_S = 5.0
MOST_BYTES = 128 << 10
MOST_KEYS = 64
MOST_TOKEN_BYTES = 16 << 10
LEAST_RSA_BITS = 2048
DISCOVERY = "/.well-known/openid-configuration"
_TOKENS_REMEMBERED = 10_000
_LONGEST_NAME = 100

logger = logging.getLogger(__name__)


def is_token(secret: str) -> bool:
    """Return True for what has the form of a JWT: three parts that begin with an object of JSON."""
    return secret.startswith("eyJ") and secret.count(".") == 2


class Tokens:
    """The tokens that one process accepts."""

    def __init__(self, settings: Settings, clock_s: Callable[[], float] = time.monotonic) -> None:
        """The settings have a provider."""
        self._issuer, self._audience = settings.oidc_issuer, settings.oidc_audience
        self._claim, self._roles = settings.oidc_claim, settings.role_by_claim
        self._clock_s = clock_s
        self._tls = tls.trusting(settings.ca_file)
        self._remembered: dict[bytes, tuple[Principal, float]] = {}
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_at_s = self._asked_at_s = float("-inf")
        self._fetching: asyncio.Task[None] | None = None

    async def verify(self, token: str) -> Principal:
        """Return the principal of a token.

        Raises Unauthenticated for one that is not valid here, Forbidden for a person without a role, and NotReady while the
        provider's keys are not known.
        """
        digest = hashlib.sha256(token.encode()).digest()
        found, until_s = self._remembered.get(digest, (None, 0.0))
        if found is not None and self._clock_s() < until_s and is_current(found):
            return found
        if len(token) > MOST_TOKEN_BYTES:
            raise Unauthenticated(f"the token has more than {MOST_TOKEN_BYTES} bytes")
        claims = await self._claims_of(token)
        principal = self._principal_of(claims)
        while len(self._remembered) >= _TOKENS_REMEMBERED:
            self._remembered.pop(next(iter(self._remembered)), None)
        self._remembered[digest] = principal, self._clock_s() + REMEMBERED_S
        return principal

    async def close(self) -> None:
        """End what is being fetched."""
        if self._fetching is not None:
            self._fetching.cancel()
            with suppress(asyncio.CancelledError):
                await self._fetching

    async def _claims_of(self, token: str) -> dict[str, Any]:
        try:
            header = jwt.get_unverified_header(token)
            algorithm, key_id = header.get("alg"), header.get("kid", "")
            if algorithm not in ALGORITHMS or not isinstance(key_id, str):
                raise Unauthenticated(
                    f"the token is signed by {algorithm!r}; allowed: {', '.join(ALGORITHMS)}, with a key's id"
                )
            key = await self._key_of(key_id)
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.ExpiredSignatureError as error:
            raise Unauthenticated("the token has expired; sign in again, with: octet login") from error
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise Unauthenticated(f"the token is not valid here: {error}") from error
        return claims

    def _principal_of(self, claims: Mapping[str, Any]) -> Principal:
        """Return the principal of verified claims: the first entry of the operator's table that the person has decides."""
        name = _name_of(claims)
        values = _values_of(claims, self._claim)
        for value, (tenant, role) in self._roles.items():
            if value == "*" or value in values:
                return of_role(name, tenant, role, expires_at=float(claims["exp"]) + LEEWAY_S)
        raise Forbidden(
            f"{name} is signed in and has no role here: its claim {self._claim!r} has none of the values that "
            "OCTET_OIDC_ROLES names. Ask the operator for one"
        )

    async def _key_of(self, key_id: str) -> jwt.PyJWK:
        """Return the provider's key of this id. Waits for the provider only if the key is not known."""
        age_s = self._clock_s() - self._fetched_at_s
        if key_id in self._keys and age_s < GOOD_FOR_S:
            if age_s > REFRESHED_EVERY_S:
                self._begin_fetch()
            return self._keys[key_id]
        fetching = self._begin_fetch()
        if fetching is not None:
            await asyncio.shield(fetching)
        if self._clock_s() - self._fetched_at_s >= GOOD_FOR_S:
            raise NotReady("the identity provider does not answer, so no token can be checked; keys are")
        if key_id not in self._keys:
            raise Unauthenticated("the token is signed by a key that the identity provider does not have")
        return self._keys[key_id]

    def _begin_fetch(self) -> "asyncio.Task[None] | None":
        """Have the keys fetched, and return that; None if they were asked for just now. There is one at a time."""
        if self._fetching is not None and not self._fetching.done():
            return self._fetching
        if self._clock_s() - self._asked_at_s < ASKED_AT_MOST_EVERY_S:
            return None
        self._asked_at_s = self._clock_s()
        self._fetching = asyncio.create_task(self._fetch_keys())
        return self._fetching

    async def _fetch_keys(self) -> None:
        """Fetch discovery document and keys. A failure is logged, and leaves the keys as they are."""
        try:
            is_here = names_loopback(urlsplit(self._issuer).hostname or "")  # where no proxy of the environment leads
            fetching = httpx.AsyncClient(verify=self._tls, timeout=FETCH_S, trust_env=not is_here)
            async with asyncio.timeout(FETCH_S), fetching as client:
                discovery = await _fetch(client, self._issuer.rstrip("/") + DISCOVERY)
                if discovery.get("issuer") != self._issuer:
                    raise ValueError(f"its document is of the issuer {discovery.get('issuer')!r}")
                address = str(discovery.get("jwks_uri"))
                if not is_safe_url(address):
                    raise ValueError(f"its jwks_uri is {address!r}; allowed: https://…")
                self._keys = _usable_keys(await _fetch(client, address))
                self._fetched_at_s = self._clock_s()
        except (httpx.HTTPError, TimeoutError, ValueError, jwt.PyJWTError) as error:
            reason = str(error) or type(error).__name__
            logger.warning("the keys of the identity provider %s were not fetched: %s", self._issuer, reason)


def is_current(principal: Principal) -> bool:
    """Return False once a principal's token has expired."""
    return principal.expires_at is None or time.time() < principal.expires_at


async def _fetch(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """Fetch an object of JSON. Raises httpx.HTTPError, and ValueError for an answer that is none or is too large."""
    content = bytearray()
    async with client.stream("GET", url, headers={"Accept": "application/json"}) as response:
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"{urlsplit(url).path} answered {response.status_code}")
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > MOST_BYTES:
                raise ValueError(f"{urlsplit(url).path} has more than {MOST_BYTES} bytes")
    document = json.loads(content)
    if not isinstance(document, dict):
        raise ValueError(f"{urlsplit(url).path} is no object of JSON")
    return document


def _usable_keys(document: Mapping[str, Any]) -> dict[str, jwt.PyJWK]:
    """Return the keys that sign by an allowed algorithm, by their ids. Symmetric keys are never among them."""
    found: dict[str, jwt.PyJWK] = {}
    listed = document.get("keys")
    for each in listed[:MOST_KEYS] if isinstance(listed, list) else ():
        if not isinstance(each, dict) or each.get("kty") not in {"RSA", "EC"} or each.get("use", "sig") != "sig":
            continue
        try:
            key = jwt.PyJWK(each)
        except jwt.PyJWTError:
            continue  # of an algorithm or a curve that is not known
        is_weak = each["kty"] == "RSA" and key.key.key_size < LEAST_RSA_BITS
        if key.algorithm_name in ALGORITHMS and not is_weak:
            found[key.key_id or ""] = key
    if not found:
        raise ValueError(f"it lists no key for {' or '.join(ALGORITHMS)}")
    return found


def _name_of(claims: Mapping[str, Any]) -> str:
    """Name a person for the audit: what people call them, and the id that the provider never gives to another."""
    subject = _printable(claims["sub"])
    called = next((claims[key] for key in ("email", "preferred_username", "name") if isinstance(claims.get(key), str)), None)
    return f"{_printable(called)} ({subject})" if called else subject


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:_LONGEST_NAME])


def _values_of(claims: Mapping[str, Any], claim: str) -> set[str]:
    """Return the values of a claim: a text, or a list of them. A name with dots may lead into objects."""
    value: Any = claims.get(claim)
    if value is None:
        value = claims
        for part in claim.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return {each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)}

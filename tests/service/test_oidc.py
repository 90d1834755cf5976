"""Tokens of an identity provider: what is accepted, what is refused, and how rarely the provider is asked."""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from fastapi.testclient import TestClient

from octet.service.access import tokens
from octet.service.access.principal import Principal
from octet.service.access.tokens import Tokens
from octet.service.app import create_app
from octet.service.db.engine import Database
from octet.service.errors import Forbidden, NotReady, Unauthenticated
from octet.service.settings import Settings
from tests.kit.identity_provider import CLIENT, KEYS, IdentityProvider, identity_provider
from tests.kit.waiting import wait_until
from tests.service.serving import serving
from tests.service.test_connections import connect, until_closed
from tests.service.test_settings import refused

KEY = "the key of the operator"
ROLES = {"ml-ops": "default:admin", "vision": "vision:submitter", "readers": "vision:viewer"}


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    with identity_provider() as running:
        yield running


@pytest.fixture
def settings(provider: IdentityProvider, tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, port=0, api_keys=(KEY,), **provider.settings(**ROLES))


@pytest.fixture
def client(settings: Settings, sqlite_file: Path) -> Iterator[TestClient]:
    with _client_of(settings, sqlite_file) as client:
        yield client


def status(client: TestClient, token: str, method: str = "GET", path: str = "/v1/jobs", **options: Any) -> int:
    return client.request(method, path, headers={"Authorization": f"Bearer {token}"}, **options).status_code


def detail(client: TestClient, token: str) -> str:
    answer = client.get("/v1/jobs", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 401, answer.text
    return str(answer.json()["detail"])


def test_the_first_entry_that_a_person_has_decides(client: TestClient, provider: IdentityProvider, spec_document: Any) -> None:
    vision, reader, operator = (
        provider.token("vision", "readers"),
        provider.token("readers"),
        provider.token("vision", "ml-ops"),
    )
    job = client.post("/v1/jobs", json=spec_document, headers={"Authorization": f"Bearer {vision}"})
    assert job.status_code == 201, job.text
    assert status(client, reader, path=f"/v1/jobs/{job.json()['id']}") == 200
    assert status(client, reader, "POST", json=spec_document) == 403
    assert [status(client, token, path="/v1/keys") for token in (vision, operator)] == [403, 200]
    assert status(client, provider.token("nobody's")) == 403
    assert status(client, provider.token(groups=None)) == 403
    assert status(client, provider.token(groups={"vision": True})) == 403
    wait_until(lambda: len(client.get("/v1/audit", headers={"Authorization": f"Bearer {KEY}"}).json()["data"]) >= 2)
    records = client.get("/v1/audit", headers={"Authorization": f"Bearer {KEY}"}).json()["data"]
    assert {(each["actor"], each["tenant"], each["status"]) for each in records} >= {
        ("ada@example.com (248289761001)", "vision", 201),
        ("ada@example.com (248289761001)", "vision", 403),
    }


def test_tokens_that_are_not_for_this_server_are_refused(client: TestClient, provider: IdentityProvider) -> None:
    now = time.time()
    stranger = ec.generate_private_key(ec.SECP256R1())
    for changes, words in (
        ({"aud": "another"}, "Audience"),
        ({"aud": None}, "aud"),
        ({"iss": "https://evil.example.com"}, "issuer"),
        ({"exp": now - tokens.LEEWAY_S - 5}, "expired; sign in again"),
        ({"exp": None}, "exp"),
        ({"nbf": now + tokens.LEEWAY_S + 60}, "not yet valid"),
        ({"sub": None}, "sub"),
    ):
        assert words in detail(client, provider.token("ml-ops", **changes)), changes  # type: ignore[arg-type]
    assert status(client, provider.token("ml-ops", exp=now - 5, nbf=now + 5)) == 200, "clocks differ by some seconds"
    assert status(client, provider.token("ml-ops", aud=["another", CLIENT])) == 200
    forged = jwt.encode(
        jwt.decode(provider.token("ml-ops"), options={"verify_signature": False}), stranger, "ES256", {"kid": "first"}
    )
    assert "Signature verification failed" in detail(client, forged)
    assert "more than 16384 bytes" in detail(client, provider.token("ml-ops", other="x" * 20_000))
    assert detail(client, "eyJ.eyJ.x") != ""
    assert status(client, KEY) == 200, "keys work as before"


def test_the_algorithm_is_the_keys_and_never_the_tokens(client: TestClient, provider: IdentityProvider) -> None:
    """No signature, one by the public key as if it were a secret, one by the other kind of key, one by another digest."""
    claims = jwt.decode(provider.token("ml-ops"), options={"verify_signature": False})
    rsa_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    provider.add_key("rsa", rsa_key)
    public = rsa_key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert "'none'" in detail(client, jwt.encode(claims, None, "none", {"kid": "first"}))
    assert "'HS256'" in detail(client, _signed_by_hmac(claims, public, "rsa"))
    assert status(client, provider.token("ml-ops", key_id="rsa")) == 200
    confused = jwt.encode(claims, ec.generate_private_key(ec.SECP256R1()), "ES256", {"kid": "rsa"})
    assert "not valid here" in detail(client, confused)
    assert "'RS512'" in detail(client, provider.token("ml-ops", key_id="rsa", algorithm="RS512"))


def _signed_by_hmac(claims: dict[str, Any], secret: bytes, key_id: str) -> str:
    """Sign by hand: the library refuses to do it."""
    parts = [{"alg": "HS256", "typ": "JWT", "kid": key_id}, claims]
    signed = b".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    return (signed + b"." + base64.urlsafe_b64encode(digest).rstrip(b"=")).decode()


def test_weak_and_symmetric_keys_of_the_provider_are_not_used(client: TestClient, provider: IdentityProvider) -> None:
    provider.add_key("weak", rsa.generate_private_key(public_exponent=65537, key_size=1024))
    with pytest.warns(jwt.warnings.InsecureKeyLengthWarning):
        weak = provider.token("ml-ops", key_id="weak")
    assert "does not have" in detail(client, weak)
    assert status(client, provider.token("ml-ops", key_id="first")) == 200


class Verifier:
    """The tokens of one process, with a clock of their own."""

    def __init__(self, settings: Settings) -> None:
        self.now_s = 0.0
        self.tokens = Tokens(settings, lambda: self.now_s)

    async def outcome(self, token: str) -> str:
        try:
            principal: Principal = await self.tokens.verify(token)
        except (Unauthenticated, Forbidden, NotReady) as error:
            return type(error).__name__
        return principal.tenant


@pytest.fixture
def verifier(settings: Settings) -> Verifier:
    return Verifier(settings)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_keys_are_fetched_rarely_and_a_new_one_is_found(verifier: Verifier, provider: IdentityProvider) -> None:
    for _ in range(20):
        assert await verifier.outcome(provider.token("vision")) == "vision"
    assert provider.asked[KEYS] == 1
    provider.add_key("second", ec.generate_private_key(ec.SECP256R1()))
    assert await verifier.outcome(provider.token("vision")) == "Unauthenticated", "asked for just now"
    verifier.now_s += tokens.ASKED_AT_MOST_EVERY_S
    assert await verifier.outcome(provider.token("vision")) == "vision"
    for _ in range(20):
        unknown = jwt.encode({}, ec.generate_private_key(ec.SECP256R1()), "ES256", {"kid": "unknown"})
        assert await verifier.outcome(unknown) == "Unauthenticated"
    assert provider.asked[KEYS] == 2
    claims = jwt.decode(provider.token("vision"), options={"verify_signature": False})
    taken_back = provider.keys.pop("first")
    verifier.now_s += tokens.REFRESHED_EVERY_S + 1
    outcomes = ["vision"]
    while outcomes[-1] == "vision":
        token = jwt.encode(claims | {"jti": str(len(outcomes))}, taken_back, "ES256", {"kid": "first"})
        outcomes.append(await verifier.outcome(token))
        await asyncio.sleep(0.001)  # nobody waits for the fetch, and it needs turns
    assert outcomes[-1] == "Unauthenticated"
    assert provider.asked[KEYS] == 3


@pytest.mark.anyio
async def test_an_absent_provider_is_waited_for_by_nobody_who_is_known(verifier: Verifier, provider: IdentityProvider) -> None:
    token, another = provider.token("vision"), provider.token("readers")
    provider.is_away = True
    assert await verifier.outcome(token) == "NotReady"
    assert await verifier.outcome(token) == "NotReady"
    assert sum(provider.asked.values()) == 1, "not asked again for each request"
    provider.is_away = False
    verifier.now_s += tokens.ASKED_AT_MOST_EVERY_S
    assert await verifier.outcome(token) == "vision"
    provider.waits.clear()  # it takes the request and does not answer
    verifier.now_s += tokens.REFRESHED_EVERY_S + 1
    assert await verifier.outcome(another) == "vision", "the keys of before are good meanwhile"
    provider.waits.set()
    await verifier.tokens.close()
    provider.is_away = True
    verifier.now_s += tokens.GOOD_FOR_S
    assert await verifier.outcome(token) == "NotReady"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        (KEYS, b'{"keys": [' + b" " * tokens.MOST_BYTES + b"]}", "more than"),
        (KEYS, b'{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "first"}]}', "no key for RS256 or ES256"),
        (KEYS, b"<html>", "not fetched"),
        ("/.well-known/openid-configuration", b'{"issuer": "https://other.example.com"}', "other.example.com"),
        ("/.well-known/openid-configuration", b"[]", "no object"),
    ],
    ids=["too large", "symmetric", "no JSON", "of another issuer", "no object"],
)
async def test_answers_that_cannot_be_used_are_logged_and_bounded(
    verifier: Verifier, provider: IdentityProvider, path: str, content: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    provider.answers[path] = content
    with caplog.at_level(logging.WARNING):
        assert await verifier.outcome(provider.token("vision")) == "NotReady"
    assert words in caplog.text


def test_an_event_stream_ends_with_its_token(
    settings: Settings, sqlite_file: Path, provider: IdentityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = provider.token("vision")
    request = (
        "GET /v1/stream?rows=limit%3D1 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nAuthorization: Bearer {}\r\n\r\n"
    )
    with (
        serving(settings, Database(f"sqlite:///{sqlite_file}")) as (_, port),
        connect(port, request.format(token).encode()) as stream,
    ):
        assert stream.recv(4096).startswith(b"HTTP/1.1 200 ")
        later = SimpleNamespace(time=lambda: time.time() + provider.lifetime_s + tokens.LEEWAY_S)
        monkeypatch.setattr("octet.service.access.tokens.time", later)
        until_closed(stream)


def test_without_keys_loopback_stays_the_operator_and_a_token_is_a_person(
    provider: IdentityProvider, sqlite_file: Path, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path, **provider.settings(**ROLES))
    with _client_of(settings, sqlite_file) as client:
        assert client.get("/v1/keys").status_code == 200
        assert status(client, provider.token("readers"), path="/v1/keys") == 403
        assert status(client, provider.token("readers", aud="another"), path="/v1/keys") == 401


@contextmanager
def _client_of(settings: Settings, sqlite_file: Path) -> Iterator[TestClient]:
    with (
        closing(Database(f"sqlite:///{sqlite_file}")) as database,
        TestClient(create_app(settings, database=database), base_url="http://127.0.0.1:8000") as client,
    ):
        yield client


def test_claims_of_objects_and_everyone(provider: IdentityProvider, sqlite_file: Path, tmp_path: Path) -> None:
    given = provider.settings() | {
        "oidc_claim": "realm_access.roles",
        "oidc_roles": {"admins": "default:admin", "*": "guests:viewer"},
    }
    with _client_of(Settings(data_dir=tmp_path, api_keys=(KEY,), **given), sqlite_file) as client:
        admin = provider.token(realm_access={"roles": ["admins"]})
        assert [status(client, token, path="/v1/keys") for token in (admin, provider.token())] == [200, 403]
        assert status(client, provider.token()) == 200


def test_settings_that_accept_too_much_or_nothing_are_refused(tmp_path: Path) -> None:
    def message(**values: object) -> str:
        return refused(data_dir=tmp_path, **values)

    issuer = "https://login.example.com"
    assert "set OCTET_OIDC_ISSUER too" in message(oidc_audience="octet")
    assert "set OCTET_OIDC_AUDIENCE too" in message(oidc_issuer=issuer)
    assert "OCTET_OIDC_ROLES" in message(oidc_issuer=issuer, oidc_audience="octet")
    assert "allowed: https://" in message(
        oidc_issuer="http://login.example.com", oidc_audience="octet", oidc_roles={"*": "a:viewer"}
    )
    wrong = message(oidc_issuer=issuer, oidc_audience="octet", oidc_roles={"ml": "vision:owner"})
    assert "allowed: TENANT:ROLE" in wrong
    assert "viewer, submitter, admin, scraper" in wrong

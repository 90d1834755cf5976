"""A small OpenID Connect provider over HTTP, with real keys: discovery, keys, codes of devices and browsers, and tokens."""

import base64
import hashlib
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from tests.kit.servers import running

CLIENT = "octet"
KEYS = "/keys"
DEVICE, TOKEN = "/device", "/token"
_DISCOVERY = "/.well-known/openid-configuration"


class IdentityProvider(ThreadingHTTPServer):
    """The provider. Its public methods are what people and administrators do there."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.issuer = f"http://127.0.0.1:{self.server_port}"
        self.keys: dict[str, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey] = {}
        self.asked: Counter[str] = Counter()
        """The number of requests for each path."""
        self.answers: dict[str, bytes] = {}
        """Bodies that paths answer in the place of the truth."""
        self.is_away = False
        self.waits = threading.Event()
        """Until it is set, keys are not sent."""
        self.waits.set()
        self.lifetime_s = 3600.0
        self.codes: list[str] = []
        """The codes that people were given."""
        self.approved: dict[str, dict[str, Any]] = {}
        """The claims of those who have entered their code, by code."""
        self.has_devices = True
        """Offer device authorization; authorization codes if not."""
        self.challenges: dict[str, tuple[str, str]] = {}
        """The challenge (PKCE) and the address of each authorization code."""
        self.slow_downs = 0
        self.refreshes: dict[str, dict[str, Any]] = {}
        self.add_key("first", ec.generate_private_key(ec.SECP256R1()))

    def add_key(self, key_id: str, key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> None:
        """Sign by this key from now on."""
        self.keys[key_id] = key

    def settings(self, **roles: str) -> dict[str, Any]:
        """Return the settings of a server that accepts tokens of this provider. roles: by group."""
        return {"oidc_issuer": self.issuer, "oidc_audience": CLIENT, "oidc_roles": roles}

    def token(self, *groups: str, key_id: str | None = None, algorithm: str | None = None, **claims: Any) -> str:
        """Sign a token for a person in some groups. claims: in the place of the default ones; None leaves one out."""
        key_id = key_id or list(self.keys)[-1]
        key = self.keys[key_id]
        now = time.time()
        default = {"iss": self.issuer, "aud": CLIENT, "sub": "248289761001", "email": "ada@example.com", "iat": int(now)}
        default |= {"exp": now + self.lifetime_s, "groups": list(groups), "jti": secrets.token_hex(8)}
        kept = {name: value for name, value in (default | claims).items() if value is not None}
        of_key = "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256"
        return jwt.encode(kept, key, algorithm or of_key, headers={"kid": key_id})

    def approve(self, user_code: str, *groups: str) -> None:
        """Enter a code, as somebody in some groups does in a browser."""
        self.approved[user_code] = {"groups": list(groups)}

    def log_in(self, address: str, *groups: str, **brought: str) -> None:
        """Open the address of a sign-in by a code, as somebody in some groups does in a browser. brought: of the answer."""
        asked = dict(parse_qsl(urlsplit(address).query))
        assert (asked["response_type"], asked["client_id"], asked["code_challenge_method"]) == ("code", CLIENT, "S256")
        code = secrets.token_hex(8)
        self.challenges[code] = asked["code_challenge"], asked["redirect_uri"]
        self.approved[code] = {"groups": list(groups)}
        httpx.get(asked["redirect_uri"], params={"code": code, "state": asked["state"]} | brought, trust_env=False)

    def answer(self, path: str, form: dict[str, str]) -> tuple[int, bytes]:
        """Answer a request."""
        self.asked[path] += 1
        if self.is_away:
            return 503, b""
        if path in self.answers:
            return 200, self.answers[path]
        status, document = self._document(path, form)
        return status, json.dumps(document).encode()

    def _document(self, path: str, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if path == _DISCOVERY:
            endpoints = {"device_authorization_endpoint": self.issuer + DEVICE, "token_endpoint": self.issuer + TOKEN}
            if not self.has_devices:
                endpoints = {"authorization_endpoint": f"{self.issuer}/authorize", "token_endpoint": self.issuer + TOKEN}
            return 200, {"issuer": self.issuer, "jwks_uri": self.issuer + KEYS, **endpoints}
        if path == KEYS:
            self.waits.wait()
            return 200, {"keys": [_public(key) | {"kid": key_id, "use": "sig"} for key_id, key in self.keys.items()]}
        if path == DEVICE and form["client_id"] == CLIENT:
            code = secrets.token_hex(4)
            self.codes.append(code)
            shown = {"verification_uri": f"{self.issuer}/enter", "user_code": code, "device_code": f"device {code}"}
            return 200, {**shown, "expires_in": 600, "interval": 0.05}
        if path == TOKEN:
            return self._token(form)
        return 404, {"error": "not_found"}

    def _token(self, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if form["grant_type"] == "refresh_token":
            claims = self.refreshes.pop(form["refresh_token"], None)  # each works once
            return (200, self._given(claims)) if claims is not None else (400, {"error": "invalid_grant"})
        if form["grant_type"] == "authorization_code":
            challenge, address = self.challenges.pop(form["code"])
            sent = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=").decode()
            is_right = (sent, form["redirect_uri"]) == (challenge, address)
            return (200, self._given(self.approved.pop(form["code"]))) if is_right else (400, {"error": "invalid_grant"})
        code = form["device_code"].removeprefix("device ")
        if self.slow_downs:
            self.slow_downs -= 1
            return 400, {"error": "slow_down"}
        if code not in self.approved:
            return 400, {"error": "authorization_pending"}
        return 200, self._given(self.approved.pop(code))

    def _given(self, claims: dict[str, Any]) -> dict[str, Any]:
        refresh = secrets.token_hex(8)
        self.refreshes[refresh] = claims
        return {"access_token": "opaque", "id_token": self.token(**claims), "refresh_token": refresh, "token_type": "Bearer"}


def _public(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> dict[str, Any]:
    if isinstance(key, rsa.RSAPrivateKey):
        return RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return ECAlgorithm.to_jwk(key.public_key(), as_dict=True)


class _Handler(BaseHTTPRequestHandler):
    server: IdentityProvider

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._answer({name: values[0] for name, values in parse_qs(text).items()})

    def _answer(self, form: dict[str, str]) -> None:
        status, content = self.server.answer(self.path, form)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def identity_provider() -> Iterator[IdentityProvider]:
    """Run a provider until the end of the block."""
    with running(IdentityProvider()) as provider:
        try:
            yield provider
        finally:
            provider.waits.set()

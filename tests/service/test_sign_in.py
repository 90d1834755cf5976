"""`octet login` and `octet logout` against a server and an identity provider, and the file that keeps the token."""

import json
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from octet.api_schemas.keys import SignIn
from octet.client.cli.app import build_app
from octet.client.errors import SignInFailed
from octet.client.sign_in import DeviceCode, Provider, StoredToken, TokenFile
from octet.service.db.engine import Database
from octet.service.settings import Settings
from tests.kit.identity_provider import CLIENT, TOKEN, IdentityProvider, identity_provider
from tests.kit.ports import free_port
from tests.kit.waiting import wait_until
from tests.service.serving import serving

URL = "https://octet.example.com"


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    with identity_provider() as running:
        yield running


@pytest.fixture
def sign_in(provider: IdentityProvider) -> SignIn:
    return SignIn(issuer=provider.issuer, client_id=CLIENT, audience=CLIENT, scopes=("openid",))


@pytest.fixture
def octet(
    provider: IdentityProvider, sqlite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Result]]:
    """Run a command against a server that has keys and accepts tokens of the provider."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("OCTET_API_KEY", raising=False)
    given = provider.settings(vision="vision:submitter")
    settings = Settings(data_dir=tmp_path / "data", port=0, api_keys=("the key of the operator",), **given)
    with serving(settings, Database(f"sqlite:///{sqlite_file}")) as (_, port):
        url = f"http://127.0.0.1:{port}"
        yield lambda *words: CliRunner().invoke(build_app(), [*words, "--url", url], catch_exceptions=False)


def enter_code(provider: IdentityProvider, *groups: str) -> threading.Thread:
    """Enter the next code, as somebody does in a browser meanwhile."""
    known = len(provider.codes)

    def enter() -> None:
        wait_until(lambda: len(provider.codes) > known)
        provider.approve(provider.codes[-1], *groups)

    thread = threading.Thread(target=enter)
    thread.start()
    return thread


def test_a_person_signs_in_works_and_signs_out(
    octet: Callable[..., Result], provider: IdentityProvider, tmp_path: Path
) -> None:
    refused = octet("list")
    assert refused.exit_code == 2
    assert "or sign in: octet login" in " ".join(refused.stderr.split())
    entering = enter_code(provider, "vision")
    signed_in = octet("login")
    entering.join()
    assert signed_in.exit_code == 0, signed_in.output
    assert f"enter {provider.codes[-1]}" in " ".join(signed_in.stderr.split())
    assert "You are signed in to http://127.0.0.1" in signed_in.stderr
    shown = octet("login", "--token")
    assert (shown.exit_code, shown.stdout.count("."), len(provider.codes)) == (0, 2, 1), "a token, and nobody is asked again"
    assert octet("list").exit_code == 0
    file = tmp_path / "config/octet/tokens.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert octet("keys", "list").exit_code == 2, "a submitter manages no keys"
    assert "signed out" in octet("logout").stdout
    assert octet("list").exit_code == 2
    assert "not signed in" in octet("logout").stdout


def browsing(provider: IdentityProvider, *groups: str, **brought: str) -> Callable[[DeviceCode], None]:
    """Open the address that a person is shown, as a browser does meanwhile."""
    return lambda shown: threading.Thread(target=provider.log_in, args=(shown.address, *groups), kwargs=brought).start()


def test_at_a_provider_without_devices_a_browser_brings_a_code_that_is_of_no_use_alone(
    provider: IdentityProvider, sign_in: SignIn
) -> None:
    provider.has_devices = False
    with Provider(sign_in) as at:
        token = at.sign_in(browsing(provider, "vision"))
        assert token.refresh_token is not None
        assert not provider.challenges, "the verifier was that of the challenge"
        with pytest.raises(SignInFailed, match=r"refuses it: access_denied\. Sign in again"):
            at.sign_in(browsing(provider, "vision", code="", error="access_denied"))
        with pytest.raises(SignInFailed, match="another identity provider has answered"):
            at.sign_in(browsing(provider, "vision", iss="https://evil.example.com"))


def test_what_brings_another_state_signs_nobody_in(provider: IdentityProvider, sign_in: SignIn) -> None:
    """A page that sends the browser there with a code of its own would sign the person in as somebody else."""
    provider.has_devices = False

    def show(shown: DeviceCode) -> None:
        def browse() -> None:
            provider.log_in(shown.address, "of somebody else", state="guessed")
            provider.log_in(shown.address, "vision")

        threading.Thread(target=browse).start()

    with Provider(sign_in) as at:
        token = at.sign_in(show)
    assert provider.refreshes[str(token.refresh_token)] == {"groups": ["vision"]}


def test_nobody_is_signed_in_without_a_role(octet: Callable[..., Result], provider: IdentityProvider) -> None:
    entering = enter_code(provider, "strangers")
    refused = octet("login")
    entering.join()
    assert refused.exit_code == 2
    assert "has no role here" in " ".join(refused.stderr.split())
    assert octet("list").exit_code == 2


def test_an_expired_token_is_refreshed_once_and_kept(octet: Callable[..., Result], provider: IdentityProvider) -> None:
    provider.lifetime_s = 10  # less than the 30 s that the client refreshes before
    entering = enter_code(provider, "vision")
    assert octet("login").exit_code == 0
    entering.join()
    asked = provider.asked[TOKEN]
    provider.lifetime_s = 3600
    assert octet("list").exit_code == 0
    assert octet("list").exit_code == 0
    assert provider.asked[TOKEN] == asked + 1


def test_a_sign_in_that_cannot_be_refreshed_says_what_to_do(provider: IdentityProvider, tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    stored = StoredToken("old", time.time() - 1, CLIENT, provider.issuer + TOKEN, CLIENT, "taken back")
    file.put(URL, stored)
    present = file.present(URL + "/")
    assert present is not None
    with pytest.raises(SignInFailed, match=r"invalid_grant\. Sign in again: octet login"):
        present()
    file.put(URL, StoredToken("old", time.time() - 1, CLIENT, provider.issuer + TOKEN, CLIENT))
    with pytest.raises(SignInFailed, match=r"has expired\. Sign in again"):
        present()
    file.put(URL, None)
    with pytest.raises(SignInFailed, match="nobody is signed in"):
        present()
    assert file.present(URL) is None


def test_of_two_processes_that_refresh_the_second_takes_what_the_first_got(provider: IdentityProvider, tmp_path: Path) -> None:
    """A refresh token works once, so the second one is refused."""
    file, new = TokenFile(tmp_path), StoredToken("new", time.time() + 3600, CLIENT, provider.issuer + TOKEN, CLIENT, "next")
    file.put(URL, StoredToken("old", time.time() - 1, CLIENT, provider.issuer + TOKEN, CLIENT, "used"))
    present = file.present(URL)
    assert present is not None
    answer = provider.answer

    def after_the_other(path: str, form: dict[str, str]) -> tuple[int, bytes]:
        TokenFile(tmp_path).put(URL, new)
        return answer(path, form)

    provider.answer = after_the_other  # type: ignore[method-assign]
    assert present() == "new"


def test_a_person_who_is_slow_and_one_who_never_comes(provider: IdentityProvider, sign_in: SignIn) -> None:
    provider.slow_downs = 2
    waits: list[float] = []
    shown: list[DeviceCode] = []

    def wait(wait_s: float) -> None:
        waits.append(wait_s)
        if len(waits) == 4:
            provider.approve(shown[0].code, "vision")

    with Provider(sign_in) as at:
        assert at.sign_in(shown.append, wait).refresh_token is not None
    assert waits == [0.05, 5.05, 10.05, 10.05], "each slow_down is 5 s more"
    assert shown[0].address == f"{provider.issuer}/enter"
    document = {"verification_uri": "x", "user_code": "x", "device_code": "x", "expires_in": 0, "interval": 0.05}
    provider.answers["/device"] = json.dumps(document).encode()
    with Provider(sign_in) as at, pytest.raises(SignInFailed, match="nobody has entered the code in time"):
        at.sign_in(shown.append, wait)


def test_nothing_is_sent_where_it_is_not_safe(provider: IdentityProvider, sign_in: SignIn) -> None:
    with pytest.raises(SignInFailed, match="not reached by https"):
        Provider(sign_in.model_copy(update={"issuer": "http://login.example.com"}))
    endpoints = {"device_authorization_endpoint": "http://login.example.com/device", "token_endpoint": provider.issuer + TOKEN}
    discovery = {"issuer": provider.issuer, **endpoints}
    provider.answers["/.well-known/openid-configuration"] = json.dumps(discovery).encode()
    with pytest.raises(SignInFailed, match="no device authorization"):
        Provider(sign_in)
    del provider.answers["/.well-known/openid-configuration"]
    wrong = sign_in.model_copy(update={"audience": "another"})
    with Provider(wrong) as at, pytest.raises(SignInFailed, match="no token for the audience 'another'"):
        at.sign_in(lambda shown: provider.approve(shown.code), lambda _: None)


def test_a_server_without_a_provider_says_so(sqlite_file: Path, tmp_path: Path) -> None:
    with serving(Settings(data_dir=tmp_path, port=0), Database(f"sqlite:///{sqlite_file}")) as (_, port):
        refused = CliRunner().invoke(build_app(), ["login", "--url", f"http://127.0.0.1:{port}"])
    assert refused.exit_code == 2
    assert "use an API key" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--oidc-issuer", "https://login.example.com"], "set OCTET_OIDC_AUDIENCE too"),
        (["--oidc-role", "ml-ops"], "allowed: GROUP=TENANT:ROLE"),
        (
            [
                "--oidc-issuer",
                "https://x.example.com",
                "--oidc-audience",
                "octet",
                "--oidc-role",
                "cn=ml,dc=example=vision:boss",
            ],
            "'vision:boss' for 'cn=ml,dc=example'",
        ),
        (["--internal-address", "8001"], "HOST:PORT"),
    ],
)
def test_octet_serve_says_what_is_wrong_with_its_options(options: list[str], words: str, tmp_path: Path) -> None:
    command = ["serve", "--port", str(free_port()), "--data-dir", str(tmp_path / "octet"), *options]
    ended = CliRunner().invoke(build_app(), command)
    assert ended.exit_code == 2
    assert words in " ".join(ended.stderr.replace("│", " ").split())
    assert not (tmp_path / "octet").exists()

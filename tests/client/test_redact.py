"""Secrets in texts and documents are left out, and facts whose names only look like secrets stay."""

from typing import Any

import pytest

from octet.client.redact import LEFT_OUT, Redactor, is_secret_name

PLANTED = [
    ("postgresql://octet:hunter2-pass@db:5432/octet", "hunter2-pass"),
    ("cloning https://ghp_abcdefghij0123456789ABCDEF@github.com/x/y", "ghp_abcdefghij0123456789ABCDEF"),
    ("Authorization: Bearer abc.DEF-123_456", "abc.DEF-123_456"),
    ("header {'Authorization': 'Basic dXNlcjpwYXNzd29yZA=='}", "dXNlcjpwYXNzd29yZA=="),
    ("using key AKIAIOSFODNN7EXAMPLE for s3", "AKIAIOSFODNN7EXAMPLE"),
    ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "wJalrXUtnFEMI"),
    ("login with hf_AbCdEfGhIjKlMnOpQrStUvWx", "hf_AbCdEfGhIjKlMnOpQrStUvWx"),
    ("OPENAI sk-proj-0123456789abcdefghij", "sk-proj-0123456789abcdefghij"),
    ("WANDB_API_KEY=0123456789abcdef0123", "0123456789abcdef0123"),
    ('{"password": "correct horse battery"}', "correct horse battery"),
    ("password='two words'", "two words"),
    ("--api-key=plain-value-1", "plain-value-1"),
    ("client_secret: qwertz", "qwertz"),
    ("GET https://b.s3.amazonaws.com/x?X-Amz-Signature=0badcafe&n=1", "0badcafe"),
    ("https://acc.blob.core.windows.net/c?sv=1&sig=Zm9vYmFy%3D", "Zm9vYmFy"),
    ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl", "eyJzdWIiOiIxMjM0In0"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\nxyz\n-----END RSA PRIVATE KEY-----\nafter", "MIIEpAIBAAKCAQEA"),
    ("-----BEGIN PRIVATE KEY-----\nMIIEpAIBcut", "MIIEpAIBcut"),
]
FACTS = [
    "step 3: loss 2.5, 4,132 tokens/s",
    "tokens: 4096",
    "tokens_per_s=5120.0 num_tokens: 12",
    "tokenizer: /models/tok",
    "metrics={'token_accuracy': 0.20}, token_type_ids: [0]",
    "mask_token: 271, pad_token = 0",
    "author: someone",
    "sigma: 0.1, design=x, key: q",
    "PWD=/work/here",
    "https://example.org/a@b?page=2",
]


@pytest.mark.parametrize(("text", "secret"), PLANTED, ids=[secret for _, secret in PLANTED])
def test_a_secret_is_left_out(text: str, secret: str) -> None:
    redactor = Redactor({})
    shown = redactor.text(text)
    assert secret not in shown
    assert LEFT_OUT in shown
    assert redactor.num_left_out >= 1
    assert secret not in str(redactor.document({"message": text, "list": [text]}))


@pytest.mark.parametrize("text", FACTS)
def test_a_fact_stays(text: str) -> None:
    redactor = Redactor({})
    assert redactor.text(text) == text
    assert redactor.num_left_out == 0


def test_what_follows_a_secret_stays() -> None:
    shown = Redactor({}).text(PLANTED[-2][0])
    assert shown == f"{LEFT_OUT}\nafter"
    assert Redactor({}).text("token=abc, step=3") == f"token={LEFT_OUT}, step=3"


def test_values_of_secret_variables_are_left_out_wherever_they_stand() -> None:
    redactor = Redactor({"OCTET_API_KEY": "plainwords", "MY_PASSWORD": "short", "PWD": "/home/me", "LANG": "en_US.UTF-8"})
    assert redactor.text("saw plainwords in /home/me, en_US.UTF-8, short") == f"saw {LEFT_OUT} in /home/me, en_US.UTF-8, short"
    assert redactor.document({"plainwords": 1}) == {LEFT_OUT: 1}


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True),
        ("apiKey", True),
        ("accessToken", True),
        ("db.password", True),
        ("AWS_SESSION_TOKEN", True),
        ("tokenizer", False),
        ("num_tokens", False),
        ("eos_token_id", False),
        ("compass", False),
        ("author", False),
    ],
)
def test_names_of_secrets(name: str, is_secret: bool) -> None:
    assert is_secret_name(name) == is_secret


def test_a_document_keeps_its_form() -> None:
    document: dict[str, Any] = {"a": 1, "b": [True, None, 2.5], "token": "x", "token_accuracy": 0.5, "secret": {"c": "d"}}
    shown = Redactor({}).document(document)
    assert shown == {"a": 1, "b": [True, None, 2.5], "token": LEFT_OUT, "token_accuracy": 0.5, "secret": LEFT_OUT}

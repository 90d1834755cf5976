"""Leave secrets out of what is handed to others: values of secret variables of this process, and whatever looks like a key.

A pattern that is in doubt takes too much. What is taken is replaced by `[left out]`.
"""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

LEFT_OUT = "[left out]"

_NAME = (
    r"(?:pass(?:word|wd|phrase)?|pwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|signing[_-]?key|credentials?|"
    r"authorization|auth|cookie|session[_-]?id|signature|sig|sas)"
)
_SECRET_NAME = re.compile(rf"(?:^|[^a-z]){_NAME}(?:$|[^a-z])|(?:token|secret|password|passwd|apikey)$")
_NO_SECRET_NAME = re.compile(r"token_(?!key|secret|value)\w|(?:mask|pad|eos|bos|unk|cls|sep)_token|(?:^|_)(?:old)?pwd$")
"""Facts of models and data whose names have the word, and the folder in which a shell is."""
_SHORTEST = 6
"""A shorter value of a secret variable occurs in texts by chance."""

_PATTERNS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL),
    re.compile(r"(?<=://)[^/\s@]+(?=@)"),
    re.compile(r"(?i)(?<=bearer )[\w.~+/=-]+|(?<=basic )[A-Za-z0-9+/=]{8,}"),
    re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    re.compile(r"\b(?:hf|hf_api|ghp|gho|ghu|ghs|github_pat|glpat|sk|pk|rk|xox[abprs]|dapi|wandb)[_-][\w-]{16,}"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),
    re.compile(rf"(?i)(?<=[?&])[\w-]*{_NAME}[\w-]*=[^&\s\"']+"),
)
_ASSIGNED = re.compile(
    rf"""(?ix) (?P<name> ["']? [\w.-]* {_NAME} [\w.-]* ["']? ) (?P<sign> \s* [=:] \s* )
    (?P<value> "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' | [^\s,;"'}}\])]+ )"""
)


class Redactor:
    """Replaces secrets in texts and JSON documents, and counts them."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """`environment`: the variables of this process; values of those with a secret's name are left out of every text."""
        values = {value for name, value in environment.items() if is_secret_name(name) and len(value) >= _SHORTEST}
        self._values = sorted(values, key=len, reverse=True)
        self.num_left_out = 0

    def text(self, text: str) -> str:
        """Return a text without what is or looks like a secret."""
        for value in self._values:
            self.num_left_out += text.count(value)
            text = text.replace(value, LEFT_OUT)
        for pattern in _PATTERNS:
            text = pattern.sub(self._counted(lambda _: LEFT_OUT), text)
        return _ASSIGNED.sub(self._counted(_assigned), text)

    def document(self, value: Any) -> Any:
        """Return a JSON document without secrets: texts as above, and whatever stands under a secret's name."""
        match value:
            case str():
                return self.text(value)
            case dict():
                return {self.text(name): self._field(name, item) for name, item in value.items()}
            case list() | tuple():
                return [self.document(item) for item in value]
        return value

    def _field(self, name: str, value: Any) -> Any:
        if is_secret_name(name) and isinstance(value, str | list | tuple | dict) and value:
            self.num_left_out += 1
            return LEFT_OUT
        return self.document(value)

    def _counted(self, replace: Callable[[re.Match[str]], str]) -> Callable[[re.Match[str]], str]:
        def replaced(found: re.Match[str]) -> str:
            text = replace(found)
            self.num_left_out += text != found[0]
            return text

        return replaced


def is_secret_name(name: str) -> bool:
    """Return True for the name of a variable or field whose value is a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return bool(_SECRET_NAME.search(words)) and not _NO_SECRET_NAME.search(words)


def _assigned(found: re.Match[str]) -> str:
    if not is_secret_name(found["name"].strip("\"' ")) or LEFT_OUT in found["value"]:
        return found[0]
    quote = found["value"][0] if found["value"][0] in "\"'" else ""
    return f"{found['name']}{found['sign']}{quote}{LEFT_OUT}{quote}"

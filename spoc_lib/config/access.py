"""How an OpenAI-compatible server is reached: its addresses, the key, what every request carries besides, the
certificate, and how long it may take. A load plan and a cluster's engine say it in the same words."""

from __future__ import annotations

import http.client
import os
import re
import ssl
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from spoc_lib.core.errors import InputError
from spoc_lib.core.yamlfile import SECRET, Positive, Strict, Word

#: A header with one of these in its name is a credential, and what a user writes here is kept on disk.
SECRET_WORDS = ("authorization", "api-key", "apikey", "token", "secret", "cookie", "password", "credential")
SECRET_NAMES = re.compile(r"(.*[-_ ])?(auth|key)")
SECRET_FIELDS = ("api_key", "apikey", "api-key", "access_token", "authorization", "password", "secret")
SECRET_FLAG = re.compile(r"(-*(?:api[-_]key|hf[-_]token))(=.*)?", re.DOTALL)
#: What a header may be made of (RFC 9110, section 5).
HEADER_NAME, HEADER_VALUE = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"), re.compile(r"[\t\x20-\x7e\x80-\xff]*")
OWN_HEADERS = ("content-type", "content-length", "transfer-encoding", "accept", "accept-encoding")
#: One streamed answer is asked each time, and the script says for what and how long.
OWN_FIELDS = ("messages", "prompt", "stream", "n", "max_completion_tokens")
KEY = re.compile(r"[\x21-\x7e]+")
REFUSED = re.compile(r"(?i)not support|unsupported|not permitted|not allowed|forbidden|extra|unrecogni[sz]ed|unknown|"
                     r"unexpected|invalid param|instead|deprecated")
BEARER = "Authorization"
VERSION = re.compile(r"v\d+((alpha|beta)\d*)?")
#: Ends of a path that are a page or route of a server, not the address of its API.
ROUTES = {"/chat/completions": "chat", "/completions": "completions", "/models": ""}
PAGES = ("/responses", "/messages", "/embeddings", "/api/chat", "/api/generate", "/metrics", "/health", "/docs")
#: What the load client sends besides, and a server may refuse.
OWN_CHOICES = ("ignore_eos", "stream_options", "temperature")


class Access(Strict):
    """What every request to a server has in common.

    api: the route that is asked. The key is read from the environment variable named by `api_key_env` and stands
    nowhere else; it goes as a bearer token, or alone in the header named by `api_key_header` (`api-key` at Azure,
    `x-api-key` at many gateways). `extra_body` is merged into each request; null leaves a field out, and a null
    `max_tokens` sends the budget as `max_completion_tokens`. `verify_tls`: a certificate must come from an authority
    that the system knows, or that the file named by SSL_CERT_FILE holds. `request_timeout_s` is for a whole answer,
    `idle_timeout_s` for the time without a byte.
    """

    api: Literal["chat", "completions"] = "chat"
    api_key_env: str | None = Field(None, description="name of the environment variable that holds the API key")
    api_key_header: str = Field(BEARER, description="header that carries it: Authorization, or one such as api-key")
    headers: dict[str, str] = {}
    extra_body: dict[str, Any] = {}
    verify_tls: bool = True
    request_timeout_s: Positive = 600.0
    idle_timeout_s: Positive = 120.0

    @field_validator("api_key_header")
    @classmethod
    def _key_header(cls, value: str) -> str:
        return _header_name(value)

    @field_validator("headers")
    @classmethod
    def _headers(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if SECRET_NAMES.fullmatch(name.lower()) or any(word in name.lower() for word in SECRET_WORDS) \
                    or text.lower().startswith(("bearer ", "basic ")):
                raise secret_given(f"the header {name}", "'api_key_header' (--api-key-header) names its header")
            if not HEADER_VALUE.fullmatch(text):
                raise ValueError(f"the header {name!r} holds characters that HTTP does not carry")
            _header_name(name)
        return value

    @field_validator("extra_body")
    @classmethod
    def _body(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name.lower() in SECRET_FIELDS:
                raise secret_given(f"the body field {name}")
        if word := _doubtful(value):
            raise ValueError(f"holds {word}, which may be a truth or text: write true or false, or '{word}' in quotes")
        own = [name for name in OWN_FIELDS if name in value] + ["max_tokens"] * (value.get("max_tokens") is not None)
        if own:
            raise ValueError(f"may not hold {own[0]!r}: the script says what is asked, one streamed answer each time")
        return value

    @model_validator(mode="after")
    def _once(self) -> Self:
        if self.api_key_env and self.api_key_header.lower() in map(str.lower, self.headers):
            raise ValueError(f"the header {self.api_key_header} carries the API key: leave it out of 'headers'")
        return self

    def common(self) -> dict[str, Any]:
        """These fields alone, for another object that has them."""
        return {name: getattr(self, name) for name in Access.model_fields}

    def without_key(self) -> Self:
        """The same without a key, for questions that need none."""
        return self.model_copy(update={"api_key_env": None})

    def key(self) -> str | None:
        """The API key; InputError when the variable that is named holds none."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise InputError("no-api-key", f"the environment variable {self.api_key_env} holds no API key: set it, or"
                             " leave 'api_key_env' out for an endpoint without one")
        if not KEY.fullmatch(key):  # the libraries' own sentences would repeat it
            raise InputError("bad-api-key", f"the environment variable {self.api_key_env} holds characters that no"
                             " header can carry (a line's end, perhaps): set it to the key alone")
        return key

    def credential(self) -> dict[str, str]:
        """The header that carries the key; none without a key. InputError as `key`."""
        key = self.key()
        if key is None:
            return {}
        return {self.api_key_header: f"Bearer {key}" if self.api_key_header.lower() == BEARER.lower() else key}

    def request_headers(self) -> dict[str, str]:
        """All headers that a request carries besides its own. InputError as `key`."""
        return {**self.headers, **self.credential()}

    def tls(self) -> ssl.SSLContext:
        """The context of a TLS connection, which checks the certificate or, with `verify_tls` off, nothing."""
        context = ssl.create_default_context()
        if not self.verify_tls:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def connection(self, url: str, timeout_s: float) -> http.client.HTTPConnection:
        """A connection to the host of `url`, opened when it is first used; InputError when that is no address."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InputError("bad-url", f"'{url}' is not a usable address: {error}") from error
        if parts.scheme not in ("http", "https") or not host:
            raise InputError("bad-url", f"'{url}' is not an http(s) address such as http://127.0.0.1:8000")
        if parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self.tls())
        return http.client.HTTPConnection(host, port, timeout=timeout_s)

    @property
    def route(self) -> str:
        """What is asked below the API's address."""
        return "chat/completions" if self.api == "chat" else "completions"

    def body(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """(a request's fields with `extra_body` merged in, the name under which the server wants the budget)."""
        merged = {**fields, **self.extra_body}
        budget = "max_completion_tokens" if "max_tokens" in merged else "max_tokens"
        return {name: value for name, value in merged.items() if value is not None}, budget

    def remedy(self, refusal: str) -> str:
        """What to do about a server's `refusal` that names fields of the request; empty when it names none."""
        words = re.findall(r"\w+", refusal.replace("include_usage", "stream_options"))
        sent, budget = self.body(dict.fromkeys(OWN_CHOICES, 0))
        refused = REFUSED.search(refusal) is not None  # else it may be the value that displeases
        named = [name for name in (*sent, budget) if name in words and (refused or name in OWN_CHOICES)]
        given = [name for name in named if name in self.extra_body or name == "max_completion_tokens"]
        nulls = ", ".join(f'"{name}": null' for name in named if name not in given)
        text = ""
        if nulls:
            text = f"; to leave out what it refuses: --body '{{{nulls}}}' (in a cluster file, engine.extra_body: " \
                   f"{{{nulls.replace(chr(34), '')}}})"
            text += ", and the budget is sent as max_completion_tokens" * ("max_tokens" in nulls)
        if given:
            names = ", ".join("max_tokens: null" if name == budget else name for name in given)
            text += f"; take {names} out of --body (engine.extra_body), where it stands"
        return text

    def redacted(self, text: str) -> str:
        """`text` without the API key, should a server or library ever echo it."""
        key = self.key()
        return text.replace(key, "***") if key else text


def _doubtful(value: Any) -> Word | None:
    """The first `yes`, `no`, `on` or `off` that a YAML file holds without quotes, where nothing says what is wanted."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value if isinstance(value, Word) else next(filter(None, map(_doubtful, parts)), None)


def without_secret_flag(words: Iterable[str]) -> None:
    """The fault of a flag of vLLM's that is a credential, among flags' names or the words of a command line."""
    for word in words:
        if found := SECRET_FLAG.fullmatch(word):
            raise secret_given(f"the flag {found[1]}", "vLLM itself reads VLLM_API_KEY and HF_TOKEN")


def secret_given(where: str, more: str = "") -> PydanticCustomError:
    """The fault of a credential in a file or on a command line; what is said of it does not repeat it."""
    text = f"{where} is a credential: credentials come from an environment variable, named in 'api_key_env' " \
           f"(--api-key-env)"
    return PydanticCustomError(SECRET, "{text}", {"text": f"{text}; {more}" if more else text})


def web_address(value: str) -> str:
    """`value` without white space around and with its scheme in small letters when it is an http(s) address;
    ValueError when not, or when a password stands in it."""
    value = value.strip()
    scheme, colon, rest = value.partition("://")
    if "@" in (rest if colon else value).partition("/")[0]:
        raise secret_given("a user or password in an address")
    if not colon and re.fullmatch(r"[\w.-]+(:\d+)?(/.*)?|\[[0-9a-fA-F:.]+\](:\d+)?(/.*)?", value):
        raise ValueError(f"must start with http:// or https://: write http://{value}")
    value = f"{scheme.lower()}://{rest}"
    if scheme.lower() not in ("http", "https") or not colon or re.search(r"[\x00-\x20\x7f]", value):
        raise ValueError("must start with http:// or https://, for example http://127.0.0.1:8000, and hold no space")
    host = re.split(r"[/?#]", rest)[0]
    if host.count(":") > 1 and "[" not in host:
        address, _, port = host.rpartition(":")
        raise ValueError("holds an IPv6 address, which stands in brackets: write "
                         f"{scheme.lower()}://[{address}]:{port}{rest.removeprefix(host)}")
    parts = urlsplit(value)
    if not parts.hostname:
        raise ValueError("must name a host, for example http://127.0.0.1:8000")
    _ = parts.port  # raises a sentence when there is no such port
    return value


def server_address(value: str, api: str = "chat") -> str:
    """The address of a server's API: without slashes at its end, and without the route that is asked where somebody
    pasted it; ValueError for another route or page, and as `web_address`."""
    parts = urlsplit(web_address(value))
    path = re.sub("/{2,}", "/", parts.path).rstrip("/")
    bare = f"{parts.scheme}://{parts.netloc}"
    if parts.query or parts.fragment:
        raise ValueError(f"must be scheme, host and path, no '?' and no '#': write {bare}{path}")
    ending = next((end for end in (*ROUTES, *PAGES) if path.endswith(end)), "")
    path = path.removesuffix(ending)
    if ending in PAGES:
        raise ValueError(f"ends in a page of the server ({ending}), not in its API: write {bare}{path}")
    if ROUTES.get(ending, "") not in ("", api):
        raise ValueError(f"ends in {ending}, and 'api' says {api}: write {bare}{path}, with api: {ROUTES[ending]} "
                         f"(--api {ROUTES[ending]}) where that route is meant")
    return bare + path


def _header_name(name: str) -> str:
    if not HEADER_NAME.fullmatch(name):
        raise ValueError(f"the header {name!r} holds characters that HTTP does not carry")
    if name.lower() in OWN_HEADERS:
        raise ValueError(f"the header {name} is the client's own: leave it out")
    return name


def api_url(base_url: str) -> str:
    """`http://host/v1` from `http://host` or `http://host/v1`. A path is kept, `/v1` appended where it names no version
    (`https://host/v1beta/openai` names one)."""
    base = base_url.rstrip("/")
    return base if _version(base) is not None else base + "/v1"


def root_url(base_url: str) -> str:
    """Where `/health`, `/tokenize` and `/metrics` live: the base URL up to its `/v1`."""
    base = api_url(base_url)
    return "/".join(base.split("/")[:_version(base)])


def _version(base: str) -> int | None:
    """Which part between slashes is the version of the API: the last that looks like one."""
    parts = base.split("/")
    return next((k for k in range(len(parts) - 1, 2, -1) if VERSION.fullmatch(parts[k])), None)

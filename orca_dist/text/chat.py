"""A chat as the prompt that the model was trained on, by the folder's own template.

Templates come with the model and are not trusted: they run in jinja2's sandbox and see
only the messages and the names of special tokens. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orca_dist.errors import InvalidRequest, MissingCapability, ModelError
from orca_dist.text.files import read_json, special_token

Clock = Callable[[], datetime]
Message = Mapping[str, str]

ROLES = ("system", "developer", "user", "assistant", "tool")

# What a template's own expressions may raise over odd messages, besides jinja2's errors.
_RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
)


class ChatTemplate:
    """Renders messages; a folder without a template gives one that only refuses."""

    def __init__(self, template: Template | None, special_tokens: Mapping[str, str], source: str):
        self.available = template is not None
        self._template = template
        self._special_tokens = special_tokens
        self._source = source

    @classmethod
    def load(cls, folder: Path, clock: Clock = datetime.now) -> ChatTemplate:
        """Reads `folder`; raises ModelError if its template isn't valid Jinja."""
        config = read_json(folder / "tokenizer_config.json")
        source = _source(folder, config)
        return cls(
            None if source is None else _compile(folder, source, clock),
            {key: token for key in config if (token := _special(config, key))},
            str(folder),
        )

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text, special tokens included: encode it without adding any.

        Raises MissingCapability without a template, InvalidRequest for messages that are
        malformed or that the template refuses.
        """
        if self._template is None:
            raise MissingCapability(
                f"the model in {self._source} has no chat template: send plain text or token ids"
            )
        check_messages(messages)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except _RENDER_ERRORS as error:
            raise InvalidRequest("chat", f"the chat template refuses it: {error}") from None


def check_messages(messages: Sequence[Message]) -> None:
    """Raises InvalidRequest for an empty chat, an unknown role or content that isn't text."""
    if not messages:
        raise InvalidRequest("chat", "has no messages; give at least one")
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise InvalidRequest(
                "chat", f"message {index} has the role {role!r}; known: {', '.join(ROLES)}"
            )
        if not isinstance(content, str):
            raise InvalidRequest("chat", f"the content of message {index} must be text")


def _source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template's text: its own file, or an entry of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return _configured(config.get("chat_template"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from None


def _configured(entry: Any) -> str | None:
    """One template, or several by name, of which `default` is meant."""
    if isinstance(entry, list):
        entry = next((item["template"] for item in entry if item.get("name") == "default"), None)
    return entry if isinstance(entry, str) else None


def _special(config: Mapping[str, Any], key: str) -> str | None:
    return special_token(config[key]) if key.endswith("_token") else None


def _compile(folder: Path, source: str, clock: Clock) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: clock().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelError(f"the chat template of {folder} is not valid Jinja: {error}") from None


class _Generation(Extension):
    """{% generation %} marks the assistant's words for training; here they are just words."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=False, indent=indent)

"""Prompts to token ids, token ids to text: the model directory's own tokenizer and chat template.

Runs in the jailed child only: both files come with the model and are a stranger's. The template runs in Jinja's immutable
sandbox with the names that transformers gives it, so that the same template renders the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from coordinator.environments.base import EnvironmentBroken, Message, PromptValue

TOKENIZER_LIMIT_BYTES = 128 << 20
JSON_LIMIT_BYTES = 8 << 20
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Renderer:
    """Tokenizer, chat template and limits of one model directory. Raises EnvironmentBroken when a file is unusable.

    `dated`: the moment (Unix seconds) whose date templates write; None: now. A record that began yesterday must read the same today.
    """

    def __init__(self, directory: Path, *, system_prompt: str | None, use_chat_template: bool, dated: float | None = None) -> None:
        self._directory = directory
        self._dated = dated
        self._system_prompt = system_prompt
        self._use_chat_template = use_chat_template
        self._tokenizer = _load_tokenizer(directory)
        self._settings = _read_json(directory, "tokenizer_config.json", required=False)
        self._template = _chat_template(directory, self._settings)
        config = _read_json(directory, "config.json", required=True)
        self.vocab_size = _vocab_size(config)
        self.stop_token_ids = self._stop_ids(config)
        self._check_settings()

    def render(self, prompt: PromptValue) -> tuple[list[int], str]:
        """Token ids and the text behind them. Raises EnvironmentBroken."""
        text, has_specials = self.text(prompt)
        return self._encode(text, add_special_tokens=not has_specials), text

    def opening(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[list[int], str]:
        """Token ids and text of a conversation's first request. Without a chat template its text is that of the messages, as it is."""
        text = self._whole(messages, tools)
        return self._encode(text, add_special_tokens=self._template is None), text

    def suffix(self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        """Token ids that follow the assistant's turn: its end as the chat template writes it, the new messages, the next turn's start.

        `before` ends with that turn. The turn itself is never encoded: a word stands in its place while the template renders, and what
        comes after the word is taken. Raises EnvironmentBroken when the template does not write the turn's content exactly once.
        """
        word = _stand_in([*before, *new])
        turn = {**before[-1], "content": word}
        turn.pop("tool_calls", None)  # the sampled text holds them
        text = self._whole([*before[:-1], turn, *new], tools)
        if text.count(word) != 1:
            raise EnvironmentBroken(
                f"the model's chat template writes an assistant's turn {text.count(word)} times: it cannot be continued token by token"
            )
        return self._encode(text.partition(word)[2], add_special_tokens=False)

    def _whole(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        if self._template is not None:
            return self.chat(self._with_system(messages), tools=tools)
        if tools:
            raise EnvironmentBroken(
                "the environment offers tools, and the model directory has no chat template to describe them with"
            )
        return "".join(str(message["content"]) for message in messages)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:  # the binding's ways to say that a str is no UTF-8
            raise EnvironmentBroken(f"the prompt {text[:60]!a} holds half a surrogate pair: write valid Unicode") from error
        if not ids:
            raise EnvironmentBroken(f"the prompt {text[:60]!r} has no tokens under this model's tokenizer.json")
        if max(ids) >= self.vocab_size:
            raise EnvironmentBroken(
                f"tokenizer.json gives token {max(ids)}, config.json has vocab_size {self.vocab_size}: the two are of different models"
            )
        return ids

    def text(self, prompt: PromptValue) -> tuple[str, bool]:
        """The prompt as text, and whether the chat template has already put the special tokens in."""
        if isinstance(prompt, str) and not self._use_chat_template:
            if self._system_prompt:
                raise EnvironmentBroken(
                    "environment.system_prompt is set, and the prompts are plain text: set environment.use_chat_template = true, or remove it"
                )
            return prompt, False
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return self.chat(self._with_system(messages)), True

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        if self._system_prompt and messages[0].get("role") != "system":
            return [{"role": "system", "content": self._system_prompt}, *messages]
        return list(messages)

    def chat(self, messages: Sequence[Message], *, tools: Sequence[Message] = ()) -> str:
        """Messages through the chat template, ready for the assistant's turn. Raises EnvironmentBroken."""
        if self._template is None:
            raise EnvironmentBroken(
                "the prompt is a list of messages, and the model directory has no chat template: add chat_template.jinja, or use text"
            )
        special = {name: _token(self._settings.get(name)) for name in _SPECIAL}
        names: dict[str, Any] = {name: token for name, token in special.items() if token is not None}
        if self._dated is not None:
            names["strftime_now"] = datetime.fromtimestamp(self._dated, UTC).strftime
        try:
            return str(
                self._template.render(
                    messages=list(messages),
                    tools=list(tools) or None,
                    documents=None,
                    add_generation_prompt=True,
                    **names,
                )
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise EnvironmentBroken(f"the model's chat template refused the messages: {error}") from error

    def decode(self, token_ids: Sequence[int], *, specials: bool = False) -> str:
        """Text of token ids, special tokens left out unless asked for."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not specials))

    def _stop_ids(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """generation_config's eos_token_id, else config's, else the tokenizer's eos token."""
        generation = _read_json(self._directory, "generation_config.json", required=False)
        for source in (generation, config, _text_part(config)):
            found = source.get("eos_token_id")
            if found is not None:
                return _ids(found, self.vocab_size)
        eos = _token(self._settings.get("eos_token"))
        known = None if eos is None else self._tokenizer.token_to_id(eos)
        return () if known is None else (known,)

    def _check_settings(self) -> None:
        if self._use_chat_template and self._template is None:
            raise EnvironmentBroken(
                "environment.use_chat_template is true, and the model directory has no chat template: add chat_template.jinja or switch it off"
            )
        if self._system_prompt and self._template is None:
            raise EnvironmentBroken("environment.system_prompt needs a chat template, and the model directory has none: remove it")


def _stand_in(messages: Sequence[Message]) -> str:
    """A word that no message holds."""
    held = json.dumps(list(messages))
    return next(word for word in (f"echo2turn{number}" for number in count()) if word not in held)


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training tools; here it only passes its body through."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads it from the class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def compile_template(source: str) -> Any:
    """A chat template in the sandbox. Raises EnvironmentBroken when it is not valid Jinja."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise EnvironmentBroken(f"the model's chat template is not valid Jinja: {error}") from error


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _load_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    text = _read_text(path, TOKENIZER_LIMIT_BYTES)
    if text is None:
        raise EnvironmentBroken(
            "the model directory has no tokenizer.json: save it with a fast tokenizer (save_pretrained writes it)"
        )
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the Rust binding raises bare Exception
        raise EnvironmentBroken(f"tokenizer.json cannot be loaded: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> Any:
    """The compiled template: chat_template.jinja, else tokenizer_config.json's (a text, or named ones of which `default`)."""
    source = _read_text(directory / "chat_template.jinja", JSON_LIMIT_BYTES)
    if source is None:
        given = settings.get("chat_template")
        if isinstance(given, list):
            given = next((item.get("template") for item in given if isinstance(item, dict) and item.get("name") == "default"), None)
        source = given if isinstance(given, str) else None
    return None if source is None else compile_template(source)


def _vocab_size(config: Mapping[str, Any]) -> int:
    for source in (config, _text_part(config)):
        size = source.get("vocab_size")
        if isinstance(size, int) and size > 0:
            return size
    raise EnvironmentBroken("config.json has no vocab_size: it must be the model's Hugging Face configuration")


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    part = config.get("text_config")
    return part if isinstance(part, dict) else {}


def _ids(found: object, vocab_size: int) -> tuple[int, ...]:
    ids = found if isinstance(found, list) else [found]
    if not all(isinstance(item, int) and 0 <= item < vocab_size for item in ids):
        raise EnvironmentBroken(f"eos_token_id is {found!r}; it must name token ids below vocab_size {vocab_size}")
    return tuple(dict.fromkeys(ids))


def _token(value: object) -> str | None:
    """A special token's text: plain, or in an AddedToken's JSON."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(directory: Path, name: str, *, required: bool) -> dict[str, Any]:
    text = _read_text(directory / name, JSON_LIMIT_BYTES)
    if text is None:
        if required:
            raise EnvironmentBroken(f"the model directory has no {name}: give a Hugging Face directory")
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EnvironmentBroken(f"{name} of the model directory is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise EnvironmentBroken(f"{name} of the model directory holds {type(value).__name__}, not an object")
    return value


def _read_text(path: Path, limit: int) -> str | None:
    """The file's text, None when absent. Raises EnvironmentBroken above the limit or when unreadable."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise EnvironmentBroken(f"{path.name} holds {size} bytes, above the limit of {limit}")
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentBroken(f"{path.name} of the model directory cannot be read: {error}") from error

"""Model directories, datasets and reward files small enough to be written per test; one token per character."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from coordinator.environments.jail import JailLimits
from coordinator.environments.plane import DataPlaneSpec, JailedDataPlane
from coordinator.environments.pool import PoolSettings
from coordinator.wire.environment import EnvironmentConfig

CHARACTERS = "0123456789= abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;!?#\n<>|/[]{}()_-+$%'\"\\"
SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"]
EOS = 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_ADDED = {
    "__type": "AddedToken",
    "content": "<eos>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
    "special": True,
}
SECONDS = PoolSettings(processes=1, backoff_first_s=0.01, backoff_most_s=0.05)


def write_model(directory: Path, *, chat_template: str | None = CHAT_TEMPLATE, **config: object) -> Path:
    """config.json, tokenizer.json and tokenizer_config.json of a character-level model."""
    directory.mkdir(parents=True, exist_ok=True)
    words = [*SPECIALS, *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"model_type": "qwen3", "vocab_size": len(words), "eos_token_id": EOS}
    (directory / "config.json").write_text(json.dumps(settings | config))
    names: dict[str, Any] = {"bos_token": "<bos>", "eos_token": _ADDED, "unk_token": "<unk>"}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    if chat_template is not None:
        names["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return directory


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """A JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids_of(text: str) -> list[int]:
    """Token ids of a text, ended by the end token."""
    return [len(SPECIALS) + CHARACTERS.index(letter) for letter in text] + [EOS]


def make_plane(
    model: Path,
    *,
    environment: dict[str, object],
    limits: JailLimits | None = None,
    settings: PoolSettings = SECONDS,
    **paths: Path,
) -> JailedDataPlane:
    """A data plane that is not started yet."""
    spec = DataPlaneSpec(EnvironmentConfig.model_validate(environment), 7, model, **paths)
    return JailedDataPlane(spec, limits=limits, settings=settings)


def reward_plane(
    directory: Path,
    code: str,
    *,
    rows: Sequence[object] = ({"prompt": "say"},),
    environment: dict[str, object] | None = None,
    **more: Any,
) -> JailedDataPlane:
    """A data plane on the function `reward` of `code`."""
    file = directory / "rewards.py"
    file.write_text(code)
    return make_plane(
        write_model(directory / "model"),
        environment={"type": "python:rewards.py:reward"} | (environment or {}),
        train=write_rows(directory / "train.jsonl", rows),
        code=file,
        **more,
    )

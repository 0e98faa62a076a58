"""Model directories small enough to be written per test: one token per character."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

CHARACTERS = "0123456789= abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;!?#\n<>|/[]{}()_-+$%'\""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def write_model_directory(directory: Path, *, chat_template: str | None = None) -> Path:
    """config.json, tokenizer.json and tokenizer_config.json of a character-level model."""
    directory.mkdir(parents=True, exist_ok=True)
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated") if False else pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>", "<unk>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"model_type": "qwen3", "vocab_size": len(words), "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "model", chat_template=CHAT_TEMPLATE)

"""Tokenising and chat templates, against transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.environments.base import EnvironmentBroken
from coordinator.environments.rendering import Renderer, compile_template

TALK = [
    {"role": "user", "content": " What is 1 + 1? "},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Sure?"},
]
RICH_TEMPLATE = """{%- if messages[0].role != 'system' -%}{{- '<|system|>You help.' + eos_token -}}{%- endif -%}
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {% else %}
{{ bos_token }}{{ message | tojson }}|{{ message.content.split(' ')[-1] | upper }}
    {% endif %}
{% endfor %}
{{- {'ü': [1, '<b>']} | tojson(indent=2) }}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def renderer(directory: Path, *, system_prompt: str | None = None, use_chat_template: bool = False) -> Renderer:
    return Renderer(directory, system_prompt=system_prompt, use_chat_template=use_chat_template)


@pytest.mark.parametrize("template", ["short", RICH_TEMPLATE])
@pytest.mark.parametrize("in_file", [False, True])
def test_a_chat_renders_as_in_transformers(tmp_path: Path, made: ModuleType, template: str, in_file: bool) -> None:
    """Text and token ids, from tokenizer_config.json and from chat_template.jinja (which wins)."""
    from transformers import AutoTokenizer

    source = made.CHAT_TEMPLATE if template == "short" else template
    model = made.write_model(tmp_path / "m", chat_template="wrong" if in_file else source)
    if in_file:
        (model / "chat_template.jinja").write_text(source)
    theirs = AutoTokenizer.from_pretrained(model)
    ids, text = renderer(model).render(TALK)
    assert text == theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert ids == theirs.apply_chat_template(TALK, tokenize=True, add_generation_prompt=True, return_dict=False)


def test_a_text_prompt_is_tokenised_as_in_transformers(tmp_path: Path, made: ModuleType) -> None:
    """With the tokenizer's own special tokens."""
    from tokenizers import Tokenizer, processors
    from transformers import AutoTokenizer

    model = made.write_model(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.save(str(model / "tokenizer.json"))
    ids, text = renderer(model).render("1 + 1 =")
    assert ids == AutoTokenizer.from_pretrained(model)("1 + 1 =").input_ids
    assert ids[0] == 1
    assert text == "1 + 1 ="
    chat_ids, _ = renderer(model).render(TALK)
    assert chat_ids.count(1) == 1  # the template's own; not a second one


def test_text_prompts_can_be_wrapped_as_chat(tmp_path: Path, made: ModuleType) -> None:
    """With a system prompt, which does not double one that is there."""
    wrapped = renderer(made.write_model(tmp_path / "m"), system_prompt="Be brief.", use_chat_template=True)
    assert wrapped.text("hi") == ("<bos><|system|>\nBe brief.<eos>\n<|user|>\nhi<eos>\n<|assistant|>\n", True)
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "hi"}]
    assert wrapped.text(own)[0] == "<bos><|system|>\nMine.<eos>\n<|user|>\nhi<eos>\n<|assistant|>\n"
    assert own[0]["content"] == "Mine."


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, made: ModuleType) -> Renderer:
    return renderer(made.write_model(tmp_path_factory.mktemp("model") / "m"))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_text_survives_the_tokenizer(plain: Renderer, made: ModuleType, data: st.DataObject) -> None:
    """Ids and back; special tokens leave no text."""
    text = data.draw(st.text(alphabet=made.CHARACTERS, min_size=1, max_size=50).filter(lambda t: "<" not in t))
    ids, _ = plain.render(text)
    assert ids == made.ids_of(text)[:-1]
    assert plain.decode([1, *ids, 2, 0]) == text


def test_vocabulary_and_stop_ids_come_from_the_model(tmp_path: Path, made: ModuleType) -> None:
    """generation_config, else config, else text_config, else the tokenizer's eos token."""
    model = made.write_model(tmp_path / "m")
    assert renderer(model).stop_token_ids == (2,)
    assert renderer(model).vocab_size == len(made.SPECIALS) + len(made.CHARACTERS)
    (model / "generation_config.json").write_text('{"eos_token_id": [5, 2, 5]}')
    assert renderer(model).stop_token_ids == (5, 2)
    (model / "generation_config.json").unlink()
    (model / "config.json").write_text('{"text_config": {"vocab_size": 200, "eos_token_id": 7}}')
    assert (renderer(model).vocab_size, renderer(model).stop_token_ids) == (200, (7,))
    (model / "config.json").write_text('{"vocab_size": 200}')
    assert renderer(model).stop_token_ids == (2,)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be loaded"),
        ("config.json", None, "no config.json"),
        ("config.json", "[]", "config.json of the model directory holds list"),
        ("config.json", "{", "config.json of the model directory is not JSON"),
        ("config.json", "{}", "config.json has no vocab_size"),
        ("config.json", '{"vocab_size": 100, "eos_token_id": 100}', "eos_token_id is 100"),
        ("config.json", '{"vocab_size": 10}', "are of different models"),
        ("chat_template.jinja", "{% if %}", "not valid Jinja"),
        ("chat_template.jinja", "{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("chat_template.jinja", "{{ messages[9].content.x.y }}", "refused the messages"),
        ("chat_template.jinja", "{{ 1 // 0 }}", "refused the messages"),
    ],
)
def test_an_unusable_model_file_is_named(tmp_path: Path, made: ModuleType, name: str, text: str | None, words: str) -> None:
    """With what was found and what to do."""
    model = made.write_model(tmp_path / "m")
    if text is None:
        (model / name).unlink()
    else:
        (model / name).write_text(text)
    with pytest.raises(EnvironmentBroken, match=words):
        renderer(model).render(TALK)


def test_settings_without_a_template_are_refused(tmp_path: Path, made: ModuleType) -> None:
    """Nothing is dropped in silence."""
    model = made.write_model(tmp_path / "m", chat_template=None)
    with pytest.raises(EnvironmentBroken, match="use_chat_template is true"):
        renderer(model, use_chat_template=True)
    with pytest.raises(EnvironmentBroken, match="system_prompt needs a chat template"):
        renderer(model, system_prompt="x")
    with pytest.raises(EnvironmentBroken, match="no chat template"):
        renderer(model).render(TALK)
    with pytest.raises(EnvironmentBroken, match=r"set environment\.use_chat_template = true"):
        renderer(made.write_model(tmp_path / "n"), system_prompt="x").render("text")
    with pytest.raises(EnvironmentBroken, match="has no tokens"):
        renderer(model).render("")


def test_the_default_of_several_templates_is_used(tmp_path: Path, made: ModuleType) -> None:
    """As the Hub stores them."""
    model = made.write_model(tmp_path / "m")
    config: dict[str, Any] = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert renderer(model).text(TALK)[0] == "yes"


def test_a_template_sees_no_globals() -> None:
    """The sandbox answers an undefined value."""
    assert compile_template("{{ raise_exception.__globals__ }}").render() == ""


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(attack: str) -> None:
    """Neither reach Python's insides nor change the messages."""
    from jinja2 import TemplateError

    messages: list[Any] = [{"role": "user", "content": "x"}]
    with pytest.raises((TemplateError, TypeError)):
        compile_template(attack).render(messages=messages)
    assert messages == [{"role": "user", "content": "x"}]

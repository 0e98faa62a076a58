"""A rollout function played against its record: answered from it, stopped at the first new request, held to what it said before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coordinator.environments.base import Scores, scored
from coordinator.environments.episodes import look
from coordinator.environments.rendering import Renderer
from coordinator.environments.replay import Asked, Client, PlayLimits, Replay
from coordinator.service.ports import PlayedTurn

OPENING = [{"role": "user", "content": "say"}]
Function = Callable[[Client], Awaitable[Any]]


class Episode:
    """A rollout function as an environment."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def size(self, split: str) -> int | None:
        return None

    async def play(self, split: str, index: int, client: Client) -> Scores:
        return Scores([scored(await self._function(client))])


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory, made: ModuleType) -> Renderer:
    directory = made.write_model(tmp_path_factory.mktemp("replay") / "m")
    return Renderer(directory, system_prompt=None, use_chat_template=False)


class Table:
    """Plays a function to its end or to a number of turns, answering with these texts."""

    def __init__(self, renderer: Renderer, made: ModuleType, function: Function, *, limits: PlayLimits | None = None) -> None:
        self._renderer = renderer
        self._made = made
        self._episode = Episode(function)
        self._limits = limits or PlayLimits(max_turns=8, new_tokens=500)
        self.turns: list[PlayedTurn] = []
        self.prompt_ids: tuple[int, ...] | None = None

    def look(self) -> Asked | Scores:
        replay = Replay(self._renderer, self.turns, self._limits, tool_parser="hermes", prompt_ids=self.prompt_ids)
        return look(self._episode, "train", 0, replay, seed=7, limit_s=5.0)

    def play(self, *texts: str, stop_reason: str = "stop") -> Asked | Scores:
        """The last answer of the environment."""
        said = self.look()
        assert isinstance(said, Asked), said
        self.prompt_ids = said.token_ids
        for text in texts:
            if self.turns:
                assert isinstance(said, Asked)
                self.turns[-1] = replace(self.turns[-1], placed=said.token_ids)
            ids = self._made.ids_of(text)
            self.turns.append(PlayedTurn(tuple(ids if stop_reason == "stop" else ids[:-1]), stop_reason))
            said = self.look()
            if isinstance(said, Scores):
                return said
        return said

    def words(self, said: Asked) -> str:
        return self._renderer.decode(said.token_ids, specials=True)


def outcome(said: Asked | Scores) -> tuple[str, float | None, str]:
    assert isinstance(said, Scores)
    return said.outcomes[0].kind, said.outcomes[0].reward, said.outcomes[0].detail


async def dialogue(client: Client) -> float:
    """Goes on until the model says end; the score is the number of its turns."""
    messages: list[Any] = list(OPENING)
    while True:
        reply = await client.chat.completions.create(model="any", messages=messages, temperature=0.2)
        messages.append(reply.choices[0].message)
        if reply.choices[0].message.content == "end":
            return float(sum(one["role"] == "assistant" for one in messages))
        messages.append({"role": "user", "content": "and?"})


def test_a_function_is_stopped_at_each_new_request_and_scored_at_its_end(renderer: Renderer, made: ModuleType) -> None:
    table = Table(renderer, made, dialogue)
    first = table.look()
    assert isinstance(first, Asked)
    assert table.words(first) == "<bos><|user|>\nsay<eos>\n<|assistant|>\n" == first.text
    second = table.play("a")
    assert isinstance(second, Asked)
    assert table.words(second) == "\n<|user|>\nand?<eos>\n<|assistant|>\n"  # the model's own <eos> stands before it
    assert outcome(Table(renderer, made, dialogue).play("a", "b", "end")) == ("scored", 3.0, "")


def test_a_turn_that_was_cut_gets_its_end_placed(renderer: Renderer, made: ModuleType) -> None:
    table = Table(renderer, made, dialogue)
    said = table.play("abc", stop_reason="length")
    assert isinstance(said, Asked)
    assert table.words(said) == "<eos>\n<|user|>\nand?<eos>\n<|assistant|>\n"


def test_the_record_is_the_template_s_own_rendering_when_the_model_speaks_as_it_was_written(
    renderer: Renderer, made: ModuleType
) -> None:
    """Opening, turns and suffixes one after another are what the template makes of the whole conversation."""
    table = Table(renderer, made, dialogue)
    said = table.play("a", "b c")
    assert isinstance(said, Asked)
    record = [
        *(table.prompt_ids or ()),
        *(token for turn in table.turns for token in (*turn.token_ids, *turn.placed)),
        *said.token_ids,
    ]
    talk = [*OPENING]
    for text in ("a", "b c"):
        talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
    assert record == renderer.render(talk)[0]


def test_fault_20_what_was_sampled_is_never_encoded_again(tmp_path: Path, made: ModuleType) -> None:
    """The tokenizer would write "ab" as one token; the model wrote two, and so does the record, at every later look."""
    directory = made.write_model(tmp_path / "merging")
    data = json.loads((directory / "tokenizer.json").read_text())
    data["model"]["vocab"]["ab"] = len(data["model"]["vocab"])
    data["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": r"ab|[\s\S]"}, "behavior": "Isolated", "invert": False}
    (directory / "tokenizer.json").write_text(json.dumps(data))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1}))
    merging = Renderer(directory, system_prompt=None, use_chat_template=False)
    table = Table(merging, made, dialogue)
    said = table.play("ab", "ab")
    assert isinstance(said, Asked)
    record = [
        *(table.prompt_ids or ()),
        *(token for turn in table.turns for token in (*turn.token_ids, *turn.placed)),
        *said.token_ids,
    ]
    talk = [*OPENING]
    for _ in range(2):
        talk += [{"role": "assistant", "content": "ab"}, {"role": "user", "content": "and?"}]
    encoded_again = merging.render(talk)[0]
    assert merging.decode(record, specials=True) == merging.decode(encoded_again, specials=True)
    assert len(record) == len(encoded_again) + 2
    assert [turn.token_ids for turn in table.turns] == [tuple(made.ids_of("ab"))] * 2


def test_a_rewritten_history_is_refused(renderer: Renderer, made: ModuleType) -> None:
    async def rewrites(client: Client) -> float:
        reply = await client.chat.completions.create(messages=OPENING)
        await client.chat.completions.create(messages=[{"role": "user", "content": "other"}, reply.choices[0].message])
        return 1.0

    kind, _, detail = outcome(Table(renderer, made, rewrites).play("a"))
    assert kind == "failed"
    assert "request 2 rewrites message 1" in detail


def test_a_changed_turn_of_the_model_is_refused(renderer: Renderer, made: ModuleType) -> None:
    async def edits(client: Client) -> float:
        await client.chat.completions.create(messages=OPENING)
        await client.chat.completions.create(messages=[*OPENING, {"role": "assistant", "content": "better"}])
        return 1.0

    kind, _, detail = outcome(Table(renderer, made, edits).play("a"))
    assert (kind, "changes the model's turn 1" in detail) == ("failed", True)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages is NoneType"),
        ([], "at least one message"),
        ("hello", "messages is str"),
        ([3], "message 0 is int"),
        ([{"role": "robot", "content": "x"}], "role 'robot'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "something else than text"),
        ([{"role": "user", "content": "x", "score": float}], "is no JSON"),
        ([{"role": "user", "content": "x" * (5 << 20)}], "above the limit"),
        ([{"role": "user", "content": "x" * (1 << 20)}] * 5, "bytes in all, above the limit"),
    ],
)
def test_requests_that_no_record_holds_are_refused_in_words(
    renderer: Renderer, made: ModuleType, messages: Any, words: str
) -> None:
    async def asks(client: Client) -> float:
        await client.chat.completions.create(messages=messages)
        return 1.0

    kind, _, detail = outcome(Table(renderer, made, asks).look())
    assert (kind, words in detail) == ("failed", True), detail


async def _two_at_once(client: Client) -> float:
    await asyncio.gather(*(client.chat.completions.create(messages=OPENING) for _ in range(2)))
    return 1.0


async def _many_answers(client: Client) -> float:
    await client.chat.completions.create(messages=OPENING, n=2)
    return 1.0


async def _swallows(client: Client) -> float:
    try:
        await client.chat.completions.create(messages=[])
    except Exception:
        return 1.0
    return 0.0


@pytest.mark.parametrize("function", [_two_at_once, _many_answers, _swallows])
def test_no_function_gets_around_the_rules(renderer: Renderer, made: ModuleType, function: Function) -> None:
    """Not by asking twice at once, nor for several answers, nor by swallowing what the client raises."""
    assert outcome(Table(renderer, made, function).look())[0] == "failed"


def test_a_function_that_asks_something_else_than_before_is_not_deterministic(renderer: Renderer, made: ModuleType) -> None:
    clock = iter(range(100))

    async def ticks(client: Client) -> float:
        messages: list[Any] = list(OPENING)
        while True:
            reply = await client.chat.completions.create(messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": str(next(clock))}]

    kind, _, detail = outcome(Table(renderer, made, ticks).play("a", "b"))
    assert (kind, "the environment is not deterministic: request 2 adds" in detail) == ("failed", True), detail


def test_another_opening_is_not_deterministic(renderer: Renderer, made: ModuleType) -> None:
    table = Table(renderer, made, dialogue)
    table.prompt_ids = (1, 2)
    assert "first request" in outcome(table.look())[2]


def test_random_begins_the_same_at_each_look(renderer: Renderer, made: ModuleType) -> None:
    import random

    async def rolls(client: Client) -> float:
        messages: list[Any] = list(OPENING)
        for _ in range(2):
            reply = await client.chat.completions.create(messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": str(random.random())[2:8]}]
        return 1.0

    assert outcome(Table(renderer, made, rolls).play("a", "b")) == ("scored", 1.0, "")


def test_limits_of_turns_and_tokens_end_a_rollout_without_a_score(renderer: Renderer, made: ModuleType) -> None:
    few = Table(renderer, made, dialogue, limits=PlayLimits(max_turns=2, new_tokens=500)).play("a", "b", "c")
    assert outcome(few) == ("unscored", None, "limit_turns: 2 turns (environment.max_turns)")
    short = Table(renderer, made, dialogue, limits=PlayLimits(max_turns=9, new_tokens=30)).play("abcdefgh")
    kind, reward, detail = outcome(short)
    assert (kind, reward) == ("unscored", None)
    assert detail == "limit_tokens: 39 tokens follow the prompt after turn 1 (sampling.max_new_tokens 30)"


def test_a_function_may_score_what_there_is_at_a_limit(renderer: Renderer, made: ModuleType) -> None:
    async def careful(client: Client) -> float:
        try:
            return await dialogue(client)
        except client.LimitReached:
            return 0.25

    table = Table(renderer, made, careful, limits=PlayLimits(max_turns=1, new_tokens=500))
    assert outcome(table.play("a")) == ("scored", 0.25, "")


def test_a_limit_stays_reached(renderer: Renderer, made: ModuleType) -> None:
    """A function that asks on is told the same, and still gives its score."""

    async def insists(client: Client) -> float:
        messages: list[Any] = list(OPENING)
        reached = 0
        while reached < 3:
            try:
                reply = await client.chat.completions.create(messages=messages)
                messages.append(reply.choices[0].message)
            except client.LimitReached:
                reached += 1
            messages.append({"role": "user", "content": "on"})
        return float(reached)

    table = Table(renderer, made, insists, limits=PlayLimits(max_turns=1, new_tokens=500))
    assert outcome(table.play("a")) == ("scored", 3.0, "")


def test_a_template_that_refuses_is_a_failure_whatever_the_function_makes_of_it(tmp_path: Path, made: ModuleType) -> None:
    directory = made.write_model(tmp_path / "refuses", chat_template="{{ raise_exception('no such role') }}")
    own = Renderer(directory, system_prompt=None, use_chat_template=False)

    async def swallows(client: Client) -> float:
        try:
            await client.chat.completions.create(messages=OPENING)
        except Exception:
            return 0.0
        return 1.0

    kind, _, detail = outcome(Table(own, made, swallows).look())
    assert (kind, "no such role" in detail) == ("failed", True), detail


def test_tool_calls_reach_the_function_and_its_results_the_model(tmp_path: Path, made: ModuleType) -> None:
    """Also their names and ids; a call in a turn without tools is content."""
    template = (
        "{% if tools %}<|system|>{{ tools | tojson }}{{ eos_token }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.a }}){% endfor %}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    directory = made.write_model(tmp_path / "tools", chat_template=template)
    own = Renderer(directory, system_prompt=None, use_chat_template=False)
    tools = [{"type": "function", "function": {"name": "double", "parameters": {}}}]

    async def shop(client: Client) -> float:
        messages: list[Any] = list(OPENING)
        reply = await client.chat.completions.create(messages=messages, tools=tools)
        (call,) = reply.choices[0].message.tool_calls
        assert (reply.choices[0].finish_reason, call.id, call["function"]["arguments"]) == ("tool_calls", "call_0_0", '{"a": 4}')
        messages += [reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "8"}]
        reply = await client.chat.completions.create(messages=messages, tools=tools)
        return float(reply.choices[0].message.content)

    table = Table(own, made, shop)
    said = table.play('<tool_call>{"name": "double", "arguments": {"a": 4}}</tool_call>')
    assert isinstance(said, Asked)
    assert table.words(said) == "<|tool|>8<eos><|assistant|>"
    table.turns.clear()
    table.prompt_ids = None
    assert outcome(table.play('<tool_call>{"name": "double", "arguments": {"a": 4}}</tool_call>', "8")) == ("scored", 8.0, "")


def test_tools_cannot_change_within_a_rollout(renderer: Renderer, made: ModuleType) -> None:
    async def grows(client: Client) -> float:
        reply = await client.chat.completions.create(messages=OPENING)
        talk = [*OPENING, reply.choices[0].message, {"role": "user", "content": "x"}]
        await client.chat.completions.create(messages=talk, tools=[{"type": "function", "function": {"name": "f"}}])
        return 1.0

    assert "offers other tools" in outcome(Table(renderer, made, grows).play("a"))[2]


def test_a_model_without_a_chat_template_reads_the_messages_as_they_are(tmp_path: Path, made: ModuleType) -> None:
    directory = made.write_model(tmp_path / "plain", chat_template=None)
    plain = Renderer(directory, system_prompt=None, use_chat_template=False)
    table = Table(plain, made, dialogue)
    said = table.play("a")
    assert isinstance(said, Asked)
    assert (plain.decode(table.prompt_ids or (), specials=True), table.words(said)) == ("say", "and?")


def test_a_template_that_writes_turns_twice_cannot_be_continued(tmp_path: Path, made: ModuleType) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    directory = made.write_model(tmp_path / "twice", chat_template=template)
    own = Renderer(directory, system_prompt=None, use_chat_template=False)
    assert "writes an assistant's turn 2 times" in outcome(Table(own, made, dialogue).play("a"))[2]


def test_what_a_function_raises_is_a_failure_in_words(renderer: Renderer, made: ModuleType) -> None:
    async def broken(client: Client) -> float:
        raise ValueError("no such row")

    assert outcome(Table(renderer, made, broken).look()) == ("failed", None, "the environment: ValueError: no such row")

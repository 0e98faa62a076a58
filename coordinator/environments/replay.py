"""One look of an environment at a record: its function runs from the start behind a client that answers from the record.

Nothing of a rollout lives in memory: at each turn the function is run again, its first requests are answered with the turns that were
sampled, and the first request beyond them is what the environment asks now. So a function must ask the same again when it is answered the
same: each request is held against the record, token by token. The record is append-only: a request that changes what was said before is
refused, and so are two at once. Sampled turns are never encoded again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from coordinator.environments.base import EnvironmentBroken, bounded
from coordinator.environments.messages import Item, Plain, Unusable, answer, plain, plain_tools
from coordinator.environments.rendering import Renderer
from coordinator.environments.tool_calls import parse
from coordinator.service.ports import PlayedTurn

T = TypeVar("T")


class LimitReached(Exception):
    """The rollout may not go on: no turn or no token is left. A function may catch it and score what there is."""


@dataclass(frozen=True, slots=True)
class PlayLimits:
    """Bounds of a rollout: turns, and tokens after the prompt, sampled or placed."""

    max_turns: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What the environment asks the model: the tokens that it places now; `text` of the opening, for people."""

    token_ids: tuple[int, ...]
    text: str = ""


class Replay:
    """The client's side of one look. `turns` is the record, the newest last; `prompt_ids` None: the opening is not known yet."""

    def __init__(
        self,
        renderer: Renderer,
        turns: Sequence[PlayedTurn],
        limits: PlayLimits,
        *,
        tool_parser: str,
        prompt_ids: Sequence[int] | None = None,
    ) -> None:
        self._renderer = renderer
        self._turns = tuple(turns)
        self._limits = limits
        self._parser = tool_parser
        self._prompt_ids = None if prompt_ids is None else tuple(prompt_ids)
        self._number = 0  # of the next request
        self._messages: list[Plain] = []  # of the last request
        self._tools: list[Plain] = []
        self._answers: list[tuple[Item, str]] = []  # and the text behind each
        self._asked: asyncio.Future[Asked] | None = None
        self.broken = ""  # why the function cannot be served, whatever it makes of that
        self.limit = ""  # the limit that was reached
        self.client = Client(self)

    async def first(self, playing: Awaitable[T]) -> Asked | T:
        """What the function asks beyond the record, or its result."""
        self._asked = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(playing)
        either: list[asyncio.Future[Any]] = [task, self._asked]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.broken:
            task.cancel()
            raise Unusable(self.broken)
        if self._asked.done():
            task.cancel()
            return self._asked.result()
        return task.result()

    async def create(self, messages: object, tools: object = None) -> Item:
        """The next request: answered from the record, or asked. Raises LimitReached, Unusable."""
        if self._asked is not None and self._asked.done():
            self._refuse("it asks twice at once: a rollout is one conversation")
        if self.limit:
            raise LimitReached(self.limit)
        number, self._number = self._number, self._number + 1
        try:
            given, offered = plain(messages), plain_tools(tools)
            asked = self._opening(given, offered) if number == 0 else self._reply(number, given, offered)
        except (Unusable, EnvironmentBroken) as error:
            self._refuse(str(error))
        self._messages, self._tools = given, offered
        if number < len(self._turns):
            return self._answer(number)
        self._check_limits(number, asked)
        assert self._asked is not None
        self._asked.set_result(asked)
        await asyncio.Event().wait()
        raise AssertionError("unreachable: the look is over")

    def _opening(self, given: list[Plain], tools: list[Plain]) -> Asked:
        ids, text = self._renderer.opening([_for_template(one) for one in given], tools)
        if self._prompt_ids is not None and tuple(ids) != self._prompt_ids:
            raise Unusable(
                f"the environment is not deterministic: its first request reads {bounded(text, 120)!r} now, and was another"
            )
        return Asked(tuple(ids), text)

    def _reply(self, number: int, given: list[Plain], tools: list[Plain]) -> Asked:
        """The tokens between turn `number` - 1 and the one that is asked for; they are held against the record's."""
        if tools != self._tools:
            raise Unusable(f"request {number + 1} offers other tools than the one before: the record is append-only")
        before = len(self._messages)
        for place, (then, now) in enumerate(zip(self._messages, given, strict=False)):
            if then != now:
                raise Unusable(
                    f"request {number + 1} rewrites message {place + 1}: the record is append-only, so history must stay as it was"
                )
        if len(given) <= before:
            raise Unusable(f"request {number + 1} lacks the model's turn: append it, then what the environment says")
        self._check_turn(number, given[before])
        rendered = [_for_template(one) for one in given]
        ids = self._renderer.suffix(rendered[: before + 1], rendered[before + 1 :], tools)
        turn = self._turns[number - 1]
        if turn.stop_reason == "stop" and ids[0] == turn.token_ids[-1]:
            ids = ids[1:]  # the model ended its turn itself
        if number < len(self._turns) and tuple(ids) != turn.placed:
            shown = bounded(self._renderer.decode(ids, specials=True), 120)
            raise Unusable(
                f"the environment is not deterministic: request {number + 1} adds {shown!r} now, and added something else"
            )
        return Asked(tuple(ids))

    def _check_turn(self, number: int, message: Plain) -> None:
        """The message after the last request's must be the model's turn as it was answered."""
        answered, text = self._answers[number - 1]
        said = answered.choices[0].message
        is_same = message["role"] == "assistant" and message["content"].strip() in (said.content.strip(), text.strip())
        if not is_same or message.get("tool_calls", said.tool_calls) != said.tool_calls:
            raise Unusable(
                f"request {number + 1} changes the model's turn {number}: the record is append-only, so append it as it came"
            )

    def _answer(self, number: int) -> Item:
        turn = self._turns[number]
        text = self._renderer.decode(turn.token_ids)
        parsed = parse(text, self._parser if self._tools else "none")
        before = len(self._prompt_ids or ()) + sum(len(one.token_ids) + len(one.placed) for one in self._turns[:number])
        item = answer(number, parsed, stop_reason=turn.stop_reason, prompt_tokens=before, completion_tokens=len(turn.token_ids))
        self._answers.append((item, text))
        return item

    def _check_limits(self, number: int, asked: Asked) -> None:
        if number == 0:
            return  # that the prompt fits is looked at where prompts are made
        limits = self._limits
        if number >= limits.max_turns:
            self._reach(f"limit_turns: {number} turns (environment.max_turns)")
        tokens = sum(len(one.token_ids) + len(one.placed) for one in self._turns) + len(asked.token_ids)
        if tokens >= limits.new_tokens:
            self._reach(
                f"limit_tokens: {tokens} tokens follow the prompt after turn {number} (sampling.max_new_tokens {limits.new_tokens})"
            )

    def _reach(self, words: str) -> NoReturn:
        self.limit = words
        raise LimitReached(words)

    def _refuse(self, words: str) -> NoReturn:
        self.broken = self.broken or words
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(Asked(()))  # ends the look, whatever the function does with the exception
        raise Unusable(words)


class Client:
    """What a rollout function sees of it: `await client.chat.completions.create(messages=..., tools=...)`, as OpenAI's AsyncOpenAI.

    The policy samples as the job says: arguments that would change that (temperature, max_tokens) are ignored.
    """

    LimitReached = LimitReached

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    @property
    def chat(self) -> Client:
        return self

    @property
    def completions(self) -> Client:
        return self

    async def create(self, *, messages: object, tools: object = None, n: int = 1, stream: bool = False, **_: Any) -> Item:
        """A ChatCompletion. Raises LimitReached when the rollout may not go on."""
        if n != 1 or stream:
            raise Unusable("n must be 1 and stream must be off: a rollout is one conversation")
        return await self._replay.create(messages, tools)


def _for_template(message: Plain) -> Plain:
    """As chat templates know messages: the arguments of tool calls are objects, not text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    shown = []
    for call in calls:
        function = dict(call.get("function", {})) if isinstance(call, dict) else {}
        if isinstance(function.get("arguments"), str):
            with suppress(ValueError):  # else the template shows the text
                function["arguments"] = json.loads(function["arguments"])
        shown.append({**call, "function": function})
    return {**message, "tool_calls": shown}

"""The data plane of one job: prompts and scores from jailed children, and what went wrong as outcomes of its own.

A completion is scored only if a child said so in time. A hung or crashed grading is `timeout` or `failed` for the completions of that
request, never a score; those of a built-in environment are then tried one by one, so that one completion costs the others nothing. The
share of such outcomes is watched, and `alarm()` says when it passes the limit.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coordinator.domain.mixing import Band
from coordinator.environments.base import (
    SPLITS,
    EnvironmentBroken,
    EnvironmentSpec,
    RewardSpec,
    SourceSpec,
    bounded,
    is_trainable,
    storable,
)
from coordinator.environments.jail import JailLimits, JailReport
from coordinator.environments.link import FRAME_LIMIT_BYTES, LinkBroken
from coordinator.environments.pool import Pool, PoolFull, PoolSettings
from coordinator.environments.process import ChildLost
from coordinator.environments.programs import CannotRun, Programs
from coordinator.service.ports import Continued, EnvironmentInfo, Graded, PlayedTurn, Prompt
from coordinator.wire.environment import EnvironmentConfig, SourceConfig

__all__ = ["DataPlaneSpec", "EnvironmentBroken", "JailedDataPlane", "PoolFull"]

OUTCOMES = ("scored", "unscored", "failed", "timeout")
METRICS_LIMIT = 256  # names a job may log
METRIC_NAME_CHARS = 100
ALARM_WINDOW = 1000
ALARM_LEAST = 32
ALARM_SHARE = 0.05
PROMPTS_TIMEOUT_S = 60.0
DECODE_TIMEOUT_S = 30.0
BYTES_PER_TOKEN = 36  # a Python integer and its place in a list
# An answer is parsed in the coordinator's event loop, and its texts are kept: author code may not make it longer than honest code would.
ANSWER_BYTES, ANSWER_BYTES_PER_COMPLETION, ANSWER_BYTES_PER_TOKEN = 1 << 20, 4096, 256
TEXT_CHARS, TEXT_CHARS_PER_TOKEN = 1024, 64
MOST_PROMPTS = 2_000_000  # of a split: a permutation of them is held in memory
MOST_STOPS = 256  # each lease carries them


@dataclass(frozen=True, slots=True)
class DataPlaneSpec:
    """A job's environment with every name resolved to a file on this host (None: absent).

    `files` resolves what sources and rewards name: the name in the job file, and where it lies.
    """

    environment: EnvironmentConfig
    seed: int
    tokenizer_dir: Path
    train: Path | None = None
    eval: Path | None = None
    code: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    new_tokens: int = 1024  # sampling.max_new_tokens: what may follow a prompt in all
    dated: float | None = None  # the moment whose date chat templates write; None: now

    def for_child(self) -> EnvironmentSpec:
        """The plain values that a child needs; paths are made absolute."""
        config = self.environment
        codes = {
            named.name: self.files[named.name] for named in config.files() if named.kind == "code" and named.name in self.files
        }
        return EnvironmentSpec(
            type=config.type,
            seed=self.seed,
            tokenizer_dir=str(self.tokenizer_dir.resolve()),
            train=_text(self.train),
            eval=_text(self.eval),
            code=_text(self.code),
            prompt_column=config.prompt_column,
            answer_column=config.answer_column,
            system_prompt=config.system_prompt,
            use_chat_template=config.use_chat_template,
            codes={name: str(path.resolve()) for name, path in codes.items()},
            options=config.options,
            rewards=[RewardSpec(reward.type, reward.label, reward.weight) for reward in config.rewards],
            sources=[self._source(place, source) for place, source in enumerate(config.sources)],
            difficulty_column=config.difficulty_column,
            bands=[Band(stage.low, stage.high, stage.until_group) for stage in config.curriculum],
            grade_timeout_s=config.grade_timeout_s,
            max_turns=config.max_turns,
            new_tokens=self.new_tokens,
            tool_parser=config.tool_parser,
            dated=self.dated,
        )

    def _source(self, place: int, source: SourceConfig) -> SourceSpec:
        return SourceSpec(
            type=source.type or self.environment.type,
            label=source.name or str(place),
            weight=source.weight,
            train=None if source.train is None else _text(self.files[source.train]),
            eval=None if source.eval is None else _text(self.files[source.eval]),
            options=source.options,
        )


class JailedDataPlane:
    """Implements `service.ports.DataPlane`.

    `jail` is the report of what confines the children, set by `start`.
    """

    def __init__(
        self,
        spec: DataPlaneSpec,
        *,
        processes: int = 2,
        limits: JailLimits | None = None,
        settings: PoolSettings | None = None,
    ) -> None:
        self._grade_timeout_s = spec.environment.grade_timeout_s
        self._max_turns, self._new_tokens = spec.environment.max_turns, spec.new_tokens
        chosen = settings or PoolSettings(processes=processes)
        child = spec.for_child()
        self._pool = Pool(child, limits or JailLimits(), chosen)
        self._programs = Programs(limits or JailLimits(), at_once=chosen.processes)
        self._is_scored_apart = not child.runs_author_code  # else a function may look at all completions of a prompt together
        self._is_answer_bounded = child.runs_author_code and not child.runs_programs  # tests of programs come along, and are long
        self._is_closed = False
        self._tries = chosen.processes + 1
        self._recent: deque[str] = deque(maxlen=ALARM_WINDOW)
        self._last_words = ""
        self._metrics: dict[str, float] = {}
        self._vocab_size = 0
        self.jail = JailReport()

    async def start(self) -> EnvironmentInfo:
        """Start the children. Raises EnvironmentBroken in words."""
        child = await self._pool.start()
        self.jail = child.jail
        try:
            info = _info(child.info)
        except (KeyError, TypeError, ValueError) as error:
            await self.close()
            raise EnvironmentBroken(bounded(f"the environment gave a bad description of itself: {error!r}")) from error
        self._vocab_size = info.vocab_size
        return info

    async def prompts(self, split: str, indices: Sequence[int]) -> list[Prompt]:
        """Rendered prompts, in order. Raises EnvironmentBroken, PoolFull; ValueError for an unknown split."""
        _check_split(split)
        request = {"do": "prompts", "split": split, "indices": list(indices)}
        answer = await self._ask_again(request, size=16 * len(indices))
        if "error" in answer:
            raise EnvironmentBroken(bounded(f"prompts of split {split!r} could not be made: {_shown(answer['error'])}"))
        try:
            return _prompts(answer["prompts"], list(indices), self._vocab_size)
        except (KeyError, TypeError, ValueError) as error:
            raise EnvironmentBroken(f"prompts of split {split!r} came back as something else: {error}") from error

    async def grade(self, split: str, index: int, completions: Sequence[Sequence[int]]) -> list[Graded]:
        """Outcomes of completions of one prompt, in order. Raises PoolFull when the queue's bound is reached."""
        _check_split(split)
        if not completions:
            return []
        ids = [[int(token) for token in completion] for completion in completions]
        graded = await self._graded(split, index, ids)
        self._note(graded)
        return graded

    async def _graded(self, split: str, index: int, ids: list[list[int]]) -> list[Graded]:
        size = BYTES_PER_TOKEN * sum(map(len, ids))
        request = {"do": "grade", "split": split, "index": index, "completions": ids}
        try:
            most = self._most_bytes(list(map(len, ids)))
            answer = await self._pool.ask(request, size=size, timeout_s=self._grade_timeout_s, most=most)
        except ChildLost as lost:
            if self._is_scored_apart and len(ids) > 1 and not self._is_closed:
                return [one for alone in ids for one in await self._graded(split, index, [alone])]
            return await self._unanswered("timeout" if lost.is_timeout else "failed", str(lost), ids, size)
        except LinkBroken as error:
            return [Graded("failed", None, "", bounded(str(error))) for _ in ids]
        return self._told(split, await self._settled(answer, list(map(len, ids))))

    async def play(self, split: str, index: int, prompt_ids: Sequence[int], turns: Sequence[PlayedTurn]) -> Graded | Continued:
        """What the environment makes of one record: the tokens that it places next, or the outcome. Raises PoolFull."""
        _check_split(split)
        said = await self._played(split, index, prompt_ids, turns)
        if isinstance(said, Graded):
            self._note([said])
        return said

    async def _played(self, split: str, index: int, prompt_ids: Sequence[int], turns: Sequence[PlayedTurn]) -> Graded | Continued:
        ids = [token for turn in turns for token in (*turn.token_ids, *turn.placed)]
        size = BYTES_PER_TOKEN * (len(prompt_ids) + len(ids))
        sent = [[list(turn.token_ids), turn.stop_reason, list(turn.placed)] for turn in turns]
        request = {"do": "play", "split": split, "index": index, "prompt_ids": list(prompt_ids), "turns": sent}
        try:
            most = self._most_bytes([len(ids)])
            answer = await self._pool.ask(request, size=size, timeout_s=self._grade_timeout_s, most=most)
        except ChildLost as lost:
            return (await self._unanswered("timeout" if lost.is_timeout else "failed", str(lost), [ids], size))[0]
        except LinkBroken as error:
            return Graded("failed", None, "", bounded(str(error)))
        if "placed" not in answer:
            return self._told(split, await self._settled(answer, [len(ids)]))[0]
        return self._continued(answer["placed"], turns=len(turns), before=len(ids))

    def _continued(self, placed: Any, *, turns: int, before: int) -> Graded | Continued:
        """A child's answer, held against the limits once more: it may have run author code."""
        if not isinstance(placed, list) or not all(type(token) is int and 0 <= token < self._vocab_size for token in placed):
            return Graded(
                "failed", None, "", "the environment's process answered with something else than tokens of the vocabulary"
            )
        if turns >= self._max_turns or before + len(placed) >= self._new_tokens:
            return Graded(
                "failed", None, "", "the environment's process went on beyond environment.max_turns or sampling.max_new_tokens"
            )
        return Continued(tuple(placed))

    async def close(self) -> None:
        """Kill the children. Idempotent."""
        self._is_closed = True
        await self._pool.close()

    @property
    def restarts(self) -> int:
        """Children started to replace another."""
        return self._pool.restarts

    def outcome_shares(self) -> dict[str, float]:
        """Share of each outcome over the last completions (at most 1,000); all zero before the first."""
        counts = Counter(self._recent)
        total = max(1, len(self._recent))
        return {outcome: counts[outcome] / total for outcome in OUTCOMES}

    def alarm(self) -> str | None:
        """Words when too many of the last completions could not be graded; None while all is well."""
        shares = self.outcome_shares()
        lost = shares["failed"] + shares["timeout"]
        if len(self._recent) < ALARM_LEAST or lost <= ALARM_SHARE:
            return None
        return (
            f"{lost:.0%} of the last {len(self._recent)} completions could not be graded ({shares['failed']:.0%} failed, "
            f"{shares['timeout']:.0%} timed out; limit {ALARM_SHARE:.0%}); last: {self._last_words}"
        )

    def reward_metrics(self) -> dict[str, float]:
        """The latest value of each metric that the reward function logged."""
        return dict(self._metrics)

    async def _ask_again(self, request: dict[str, Any], *, size: int) -> dict[str, Any]:
        """Prompts are pure: when a child is lost, another is asked. One more than there are: all may have been killed at once."""
        timeouts = 0
        for left in reversed(range(self._tries)):
            try:
                return await self._pool.ask(request, size=size, timeout_s=PROMPTS_TIMEOUT_S)
            except ChildLost as lost:
                timeouts += lost.is_timeout
                if left == 0 or timeouts > 1:
                    raise EnvironmentBroken(f"prompts could not be made: {lost}") from lost
        raise AssertionError("unreachable: the last try returns or raises")

    async def _unanswered(self, outcome: str, words: str, ids: list[list[int]], size: int) -> list[Graded]:
        """Outcomes of a request that took its child along; the text, at least, is for the author to see."""
        try:
            answer = await self._pool.ask({"do": "decode", "completions": ids}, size=size, timeout_s=DECODE_TIMEOUT_S)
            texts = [storable(text) for text in answer.get("texts", [])]
        except (ChildLost, PoolFull, TypeError):
            texts = []
        texts += [""] * (len(ids) - len(texts))
        return [Graded(outcome, None, text, bounded(words)) for text in texts[: len(ids)]]

    def _most_bytes(self, lengths: Sequence[int]) -> int:
        """Of an answer about completions of so many tokens each."""
        if not self._is_answer_bounded:
            return FRAME_LIMIT_BYTES
        honest = ANSWER_BYTES + sum(ANSWER_BYTES_PER_COMPLETION + ANSWER_BYTES_PER_TOKEN * length for length in lengths)
        return min(honest, FRAME_LIMIT_BYTES)

    async def _settled(self, answer: dict[str, Any], lengths: Sequence[int]) -> _Settled:
        """The outcomes in an answer about completions of so many tokens each; programs are run for theirs."""
        if "programs" not in answer:
            return _read(answer, lengths)
        try:
            work = _work(answer, len(lengths))
        except (KeyError, TypeError, ValueError) as error:
            return _Settled([_bad(error) for _ in lengths])
        graded = await asyncio.gather(*(self._program(program, work.tests, text) for program, text in work.programs))
        return _Settled([one for one, _ in graded], {"tests_passed": sum(share for _, share in graded) / max(1, len(graded))})

    async def _program(self, program: str, tests: Sequence[tuple[str, str]], text: str) -> tuple[Graded, float]:
        """The outcome of one program, and the share of its tests that it passed before it failed one."""
        try:
            ran = await self._programs.run(program, tests, limit_s=self._grade_timeout_s)
        except CannotRun as error:
            return Graded("failed", None, text, bounded(str(error))), 0.0
        return Graded("scored", float(ran.passed == ran.tests), text, storable(ran.words)), ran.passed / ran.tests

    def _told(self, split: str, settled: _Settled) -> list[Graded]:
        """The outcomes. Their metrics are kept, but those of held-out prompts: `reward_metrics` is about training.

        The latest finite values, of the first METRICS_LIMIT names: author code may invent names without end.
        """
        for full, value in settled.metrics.items() if split == "train" else ():
            name = bounded(full, METRIC_NAME_CHARS)
            if math.isfinite(value) and (name in self._metrics or len(self._metrics) < METRICS_LIMIT):
                self._metrics[name] = value
        return settled.graded

    def _note(self, graded: Sequence[Graded]) -> None:
        self._recent.extend(one.outcome for one in graded)
        words = next((one.detail for one in graded if one.outcome in ("failed", "timeout")), None)
        if words is not None:
            self._last_words = words


@dataclass(frozen=True, slots=True)
class _Settled:
    """Outcomes, and what was logged with them."""

    graded: list[Graded]
    metrics: Mapping[str, float] = field(default_factory=dict)


def _read(answer: dict[str, Any], lengths: Sequence[int]) -> _Settled:
    """A child's answer, checked field by field: it may have run author code."""
    if "error" in answer:
        return _Settled([Graded("failed", None, "", bounded(_shown(answer["error"]))) for _ in lengths])
    try:
        graded = [_graded(*values) for values in answer["graded"]]
        metrics = {storable(name): float(value) for name, value in answer["metrics"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return _Settled([_bad(error) for _ in lengths])
    if len(graded) != len(lengths):
        words = f"{len(graded)} outcomes came for {len(lengths)} completions"
        return _Settled([Graded("failed", None, "", words) for _ in lengths])
    most = [TEXT_CHARS + TEXT_CHARS_PER_TOKEN * length for length in lengths]
    return _Settled([replace(one, text=bounded(one.text, chars)) for one, chars in zip(graded, most, strict=True)], metrics)


def _bad(error: Exception) -> Graded:
    return Graded("failed", None, "", bounded(f"the grading process gave a bad answer: {error!r}"))


@dataclass(frozen=True, slots=True)
class _Work:
    """Programs with the text that each came in, and the tests that all of them must pass."""

    programs: Sequence[tuple[str, str]]
    tests: Sequence[tuple[str, str]]


def _work(answer: dict[str, Any], count: int) -> _Work:
    """Raises KeyError, TypeError or ValueError unless a child gave as many programs as were asked about, and tests."""
    programs = [(storable(program), storable(text)) for program, text in zip(answer["programs"], answer["texts"], strict=True)]
    tests = [(storable(given), storable(wanted)) for given, wanted in answer["tests"]]
    if len(programs) != count or not tests:
        raise ValueError(f"{len(programs)} programs and {len(tests)} tests for {count} completions")
    return _Work(programs, tests)


def _graded(outcome: object, reward: object, text: object, detail: object) -> Graded:
    """Raises TypeError or ValueError unless the values keep what `Graded` promises."""
    if outcome not in OUTCOMES:
        raise ValueError(f"outcome {outcome!r}")
    if (outcome == "scored") != isinstance(reward, float) or (isinstance(reward, float) and not is_trainable(reward)):
        raise ValueError(f"reward {reward!r} with outcome {outcome!r}")
    return Graded(str(outcome), reward if isinstance(reward, float) else None, storable(text), bounded(storable(detail)))


def _info(values: dict[str, Any]) -> EnvironmentInfo:
    """Raises KeyError, TypeError or ValueError unless the values are what `EnvironmentInfo` promises."""
    sizes = [values["train_prompts"], values["eval_prompts"]]
    stops, vocab_size = values["stop_token_ids"], values["vocab_size"]
    if not all(size is None or (type(size) is int and 0 <= size <= MOST_PROMPTS) for size in sizes):
        raise ValueError(f"sizes of the splits are {sizes!r}: at most {MOST_PROMPTS} prompts each, or null")
    if type(vocab_size) is not int or len(stops) > MOST_STOPS or not all(type(s) is int and 0 <= s < vocab_size for s in stops):
        raise ValueError(f"vocab_size is {vocab_size!r} and stop_token_ids are {stops!r}: at most {MOST_STOPS} below it")
    return EnvironmentInfo(sizes[0], sizes[1], vocab_size, tuple(stops))


def _prompts(answered: Any, indices: list[int], vocab_size: int) -> list[Prompt]:
    """Raises TypeError or ValueError unless these are the prompts that were asked for, with ids of the vocabulary."""
    prompts = [Prompt(index, tuple(ids), storable(text)) for index, ids, text in answered]
    if [prompt.index for prompt in prompts] != indices:
        raise ValueError(f"{len(prompts)} prompts came for {len(indices)} indices, or others than were asked for")
    for prompt in prompts:
        if not prompt.token_ids or not all(type(token) is int and 0 <= token < vocab_size for token in prompt.token_ids):
            raise ValueError(f"prompt {prompt.index} has no tokens, or tokens outside the vocabulary of {vocab_size}")
    return prompts


def _shown(words: object) -> str:
    """What a child says, whatever it is."""
    return storable(words if isinstance(words, str) else repr(words))


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; it must be one of {', '.join(SPLITS)}")


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())

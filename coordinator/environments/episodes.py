"""Environments that take several turns: a function plays the whole rollout against a client, and is scored by what it returns."""

from __future__ import annotations

import asyncio
import random
from typing import Protocol, TypeGuard

from coordinator.domain.seeds import derive
from coordinator.environments.alarm import OutOfTime, time_limit
from coordinator.environments.author_code import failed
from coordinator.environments.base import Environment, EnvironmentBroken, Outcome, Scores, bounded
from coordinator.environments.messages import Unusable
from coordinator.environments.mixture import Curriculum, Mixture
from coordinator.environments.replay import Asked, Client, LimitReached, Replay

SHARE_OF_LIMIT = 0.8


class Episodic(Protocol):
    """An environment that is played."""

    def size(self, split: str) -> int | None: ...

    async def play(self, split: str, index: int, client: Client) -> Scores:
        """One rollout of that prompt, from its first request to its one outcome. Deterministic: answered the same, it asks the same."""
        ...


def is_episodic(environment: object) -> TypeGuard[Episodic]:
    """Whether an environment is played in turns."""
    return hasattr(environment, "play")


def leaf(environment: Environment, split: str, index: int) -> tuple[Environment, int]:
    """The environment that makes a prompt, below mixtures and stages, and the prompt's index there."""
    while isinstance(environment, (Mixture, Curriculum)):
        environment, index = environment.at(split, index)
    return environment, index


def has_episodes(environment: Environment) -> bool:
    """Whether any part of an environment is played in turns."""
    if isinstance(environment, (Mixture, Curriculum)):
        return any(has_episodes(part) for part in environment.parts)
    return is_episodic(environment)


def look(environment: Episodic, split: str, index: int, replay: Replay, *, seed: int, limit_s: float) -> Asked | Scores:
    """What the environment asks beyond the record, or the scores; what goes wrong is an outcome of its own.

    `random` begins the same for every look at a prompt, so that a function may use it.
    """
    random.seed(derive(seed, "episode", split, index))
    try:
        with time_limit(SHARE_OF_LIMIT * limit_s):
            return asyncio.run(replay.first(environment.play(split, index, replay.client)))
    except OutOfTime as late:
        return Scores([Outcome("timeout", None, f"the environment: {late} (a share of environment.grade_timeout_s)")], {}, True)
    except LimitReached as reached:
        return Scores([Outcome("unscored", None, bounded(str(reached)))])
    except (Unusable, EnvironmentBroken) as error:
        return Scores([failed(str(error))])
    except BaseException as error:  # SystemExit too: whatever an environment raises is an outcome
        spent = not isinstance(error, Exception) or isinstance(error, (MemoryError, RecursionError))
        return Scores([failed(f"the environment: {type(error).__name__}: {error}")], {}, spent)

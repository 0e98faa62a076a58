"""`python:FILE:FUNCTION` with several turns: `async def rollout(client, row)` plays a whole rollout and returns its score.

    reply = await client.chat.completions.create(messages=[...], tools=[...])    as with OpenAI's AsyncOpenAI

`row` is the data set's row, all columns. The result is a number, None ("does not apply"), or a dict with "score" whose other numbers are
metrics. `client.LimitReached` is raised when no turn or token is left. The function is run again from its start at every turn, so it
must ask the same when it is answered the same; `random` is seeded. Author code loads and runs in a jailed process only.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from numbers import Real

from coordinator.environments.author_code import RewardFunction, failed, outcome, words_of
from coordinator.environments.base import Completion, EnvironmentBroken, PromptValue, Scores, bounded
from coordinator.environments.datasets import Rows
from coordinator.environments.messages import Unusable
from coordinator.environments.replay import Client, LimitReached

METRICS_LIMIT = 64


def is_rollout(function: RewardFunction) -> bool:
    """Whether a function asks for a `client`."""
    try:
        return "client" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


class PythonRollout:
    """Rows that a function of the author's plays. There is no held-out evaluation: that is of one turn."""

    def __init__(self, splits: Mapping[str, Rows], function: RewardFunction, *, file_name: str) -> None:
        if "eval" in splits:
            raise EnvironmentBroken("environment.eval is set, and held-out evaluation asks for one completion only: remove it")
        if not inspect.iscoroutinefunction(function):
            raise EnvironmentBroken("a function with a parameter `client` plays a rollout: write `async def rollout(client, row)`")
        names = list(inspect.signature(function).parameters)
        if names[:2] != ["client", "row"]:
            raise EnvironmentBroken(f"the rollout function takes {', '.join(names)}; it must take (client, row)")
        self._rows = splits["train"]
        self._function = function
        self._file_name = file_name

    def size(self, split: str) -> int | None:
        return len(self._rows) if split == "train" else 0

    def prompt(self, split: str, index: int) -> PromptValue:  # noqa: ARG002 (one split)
        return self._rows.prompt(index)

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        raise AssertionError(f"it is played, not scored: {split} {index} {len(completions)}")

    async def play(self, split: str, index: int, client: Client) -> Scores:  # noqa: ARG002 (one split)
        """One rollout. What the client raises passes through; whatever else the function raises is a failure in words."""
        row = dict.fromkeys(self._rows.columns) | self._rows.row(index).values
        try:
            result = await self._function(client, row)
        except (LimitReached, Unusable):
            raise
        except Exception as error:
            spent = isinstance(error, (MemoryError, RecursionError))
            return Scores([failed(words_of(error, self._file_name))], {}, spent)
        if not isinstance(result, Mapping):
            return Scores([outcome(result)])
        if "score" not in result:
            return Scores(
                [
                    failed(
                        f"the rollout function returned a dict without 'score' (it has: {bounded(', '.join(map(str, result)), 100)})"
                    )
                ]
            )
        logged = [
            (bounded(str(name), 100), float(value)) for name, value in result.items() if name != "score" and isinstance(value, Real)
        ]
        return Scores([outcome(result["score"])], dict(logged[:METRICS_LIMIT]))

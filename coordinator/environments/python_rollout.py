"""`python:FILE:FUNCTION` with several turns: `async def rollout(client, row)` plays a whole rollout and returns its score.

    reply = await client.chat.completions.create(messages=[...], tools=[...])    as with OpenAI's AsyncOpenAI

`row` is the data set's row, all columns. The result is a number, None ("does not apply"), or a dict with "score" whose other numbers are
metrics. `client.LimitReached` is raised when no turn or token is left. The function is run again from its start at every turn, so it
must ask the same when it is answered the same; `random` is seeded. Author code loads and runs in a jailed process only.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Real

from coordinator.environments.author_code import RewardFunction, failed, outcome, words_of
from coordinator.environments.base import EnvironmentBroken, Scores, bounded
from coordinator.environments.datasets import RowPrompts, Rows
from coordinator.environments.messages import Unusable
from coordinator.environments.replay import Client, LimitReached

METRICS_LIMIT = 64


def is_rollout(function: RewardFunction) -> bool:
    """Whether a function asks for a `client`."""
    try:
        return "client" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


class PythonRollout(RowPrompts):
    """Rows that a function of the author's plays."""

    def __init__(self, splits: Mapping[str, Rows], function: RewardFunction, *, file_name: str) -> None:
        if not inspect.iscoroutinefunction(function):
            raise EnvironmentBroken("a function with a parameter `client` plays a rollout: write `async def rollout(client, row)`")
        names = list(inspect.signature(function).parameters)
        if names[:2] != ["client", "row"]:
            raise EnvironmentBroken(f"the rollout function takes {', '.join(names)}; it must take (client, row)")
        super().__init__(splits)
        self._function = function
        self._file_name = file_name

    async def play(self, split: str, index: int, client: Client) -> Scores:
        """One rollout. What the client raises passes through; whatever else the function raises is a failure in words."""
        rows = self._splits[split]
        row = dict.fromkeys(rows.columns) | rows.row(index).values
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

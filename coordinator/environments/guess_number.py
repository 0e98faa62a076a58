"""A built-in environment of several turns: find a number. The environment says "higher" or "lower" until the guess is right."""

from __future__ import annotations

import re
from collections.abc import Sequence

from coordinator.domain.seeds import derive
from coordinator.environments.base import Completion, Scores, check_index, scored
from coordinator.environments.replay import Client, LimitReached

LARGEST = 99
_NUMBER = re.compile(r"\d{1,9}")


class GuessNumber:
    """An endless train split; the held-out one holds each number once, so that a policy's mean there is its mean over all numbers.

    The score is 1 for a right first guess and 1/k for the k-th; when turns or tokens run out before that, a quarter of how near the nearest
    guess came, so that a model which never finds the number has something to learn from.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def size(self, split: str) -> int | None:
        return None if split == "train" else LARGEST

    def prompt(self, split: str, index: int) -> str:
        check_index(split, index, self.size(split))
        return f"Guess my number from 1 to {LARGEST}.\n"  # of all problems: which number it is comes out in the turns

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        raise AssertionError(f"it is played, not scored: {split} {index} {len(completions)}")

    async def play(self, split: str, index: int, client: Client) -> Scores:
        """Until the guess is right or a limit is reached."""
        number = 1 + (index if split == "eval" else derive(self._seed, "guess", split, index) % LARGEST)
        messages = [{"role": "user", "content": self.prompt(split, index)}]
        nearest = 0.0
        turns = 0
        while True:
            try:
                reply = await client.chat.completions.create(messages=messages)
            except LimitReached:
                return Scores([scored(nearest / 4)], {"guess/turns": float(turns), "guess/found": 0.0})
            turns += 1
            said = reply.choices[0].message.content
            found = _NUMBER.search(said)
            guess = int(found[0]) if found else None
            if guess == number:
                return Scores([scored(1.0 / turns)], {"guess/turns": float(turns), "guess/found": 1.0})
            if guess is not None:
                nearest = max(nearest, 1 - min(abs(guess - number), LARGEST) / LARGEST)
            words = "a number please" if guess is None else "higher" if guess < number else "lower"
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"{words}\n"}]

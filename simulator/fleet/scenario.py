"""What an operator asks of `echo2 simulate`: a TOML file, checked key by key. Times in seconds or hours as each name says.

A fleet is a list of groups of equal workers. Rates, links and churn are the group's; a price may differ from worker to worker.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MOST_WORKERS = 100_000
Topology = Literal["swarm", "star", "chain", "tree"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ScenarioWrong(Exception):
    """The scenario cannot be used; one line for each key, with the fix."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Lengths(_Part):
    """How long completions are: log-normal, cut at `max_tokens`."""

    mean_tokens: Positive = 1024.0  # of the uncut distribution
    cv: NotNegative = 0.7  # standard deviation over mean
    max_tokens: int = Field(8192, ge=1)


class Job(_Part):
    """What the learner eats and how stale it may be."""

    group_size: int = Field(ge=1, le=1024)  # G
    groups_per_step: int = Field(ge=1, le=65_536)  # B
    staleness: int = Field(ge=0, le=100)  # S
    publish_every: Literal["auto"] | Annotated[int, Field(ge=1, le=101)] = "auto"  # kappa
    train_s: Positive  # one step
    grade_s: NotNegative = 0.5  # from a group's last completion to its rewards
    steps: int | None = Field(None, ge=1)  # None: until the hours are over
    no_signal: float = Field(0.0, ge=0, lt=1)  # share of groups whose rewards are all alike
    on_update: Literal["keep", "idle"] = "keep"  # idle: no room for a second copy, the worker stands still while it loads
    lengths: Lengths = Lengths()


class Snapshot(_Part):
    """What one version weighs on the wire, and what a worker does with it."""

    keyframe_bytes: Positive
    delta_bytes: Positive | None = None  # None: every version travels whole
    apply_s: NotNegative = 1.0  # a worker stands still so long at each version
    load_s: NotNegative = 60.0  # start of the engine, after the first keyframe


class Network(_Part):
    """The coordinator's side, and how pieces go round."""

    seeder_up_mbps: Positive = 1000.0
    rtt_s: float = Field(0.05, ge=0, le=10)
    topology: Topology = "swarm"
    usd_per_gb_up: NotNegative = 0.0  # what the coordinator's host pays for what it sends


class Market(_Part):
    """Cost-aware activation; off: every worker is active from its start."""

    on: bool = True
    headroom: float = Field(1.15, ge=1, le=10)
    review_s: Positive = 600.0  # between two decisions
    react_s: NotNegative = 60.0  # after a loss or a new price, but no sooner than this after the last decision


class Budget(_Part):
    """What stops the job or holds activation back."""

    usd: Positive | None = None
    usd_per_hour: Positive | None = None
    deadline_hours: Positive | None = None


class Liveness(_Part):
    """The product's defaults."""

    heartbeat_s: Positive = 10.0
    lost_after_s: Positive = 35.0
    lease_min_s: Positive = 30.0
    lease_max_s: Positive = 3600.0


class PriceMove(_Part):
    """From `hours` on each worker of the group asks so much (times its own spread)."""

    hours: NotNegative
    usd_per_hour: NotNegative


class Group(_Part):
    """Equal workers."""

    name: str = Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9._ -]+$")
    count: int = Field(ge=1, le=MOST_WORKERS)
    completions_per_second: Positive  # of one worker, all slots busy
    slots: int = Field(ge=1, le=4096)
    up_mbps: Positive
    down_mbps: Positive
    usd_per_hour: NotNegative = 0.0
    usd_per_gb_up: NotNegative = 0.0
    usd_per_gb_down: NotNegative = 0.0
    price_spread: float = Field(0.0, ge=0, le=2)  # standard deviation of the log of a worker's price
    prices: tuple[PriceMove, ...] = ()
    admitted: float = Field(1.0, gt=0, le=1)  # share of its completions that are accepted
    churn_per_hour: float = Field(0.0, ge=0, lt=1)  # chance that a worker is lost within an hour
    return_hours: NotNegative = 0.5  # mean time until it, or another in its place, is there again
    start_hours: NotNegative = 0.0


class Scenario(_Part):
    """One what-if."""

    name: str = Field(min_length=1, max_length=100)
    seed: int = Field(0, ge=0)
    hours: float = Field(gt=0, le=24 * 365)
    job: Job
    snapshot: Snapshot
    network: Network = Network()
    market: Market = Market()
    budget: Budget = Budget()
    liveness: Liveness = Liveness()
    learner_usd_per_hour: NotNegative = 0.0
    fleet: tuple[Group, ...] = Field(min_length=1, max_length=1000)

    @property
    def rollouts_per_step(self) -> int:
        """R = G * B."""
        return self.job.group_size * self.job.groups_per_step

    @property
    def workers(self) -> int:
        """In all groups."""
        return sum(group.count for group in self.fleet)

    @model_validator(mode="after")
    def _fits(self) -> Scenario:
        names = [group.name for group in self.fleet]
        if len(set(names)) < len(names):
            raise ValueError(f"fleet: the groups are named {', '.join(names)}: give each a name of its own")
        if self.workers > MOST_WORKERS:
            raise ValueError(f"fleet: {self.workers} workers: at most {MOST_WORKERS} can be simulated")
        if self.job.lengths.max_tokens < self.job.lengths.mean_tokens:
            raise ValueError("job.lengths.max_tokens is below mean_tokens: no completion would be of mean length")
        if self.liveness.lost_after_s <= self.liveness.heartbeat_s:
            raise ValueError("liveness.lost_after_s must exceed heartbeat_s: every worker would count as lost between two beats")
        return self


def read_scenario(path: Path) -> Scenario:
    """Read and check a file. Raises ScenarioWrong."""
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise ScenarioWrong(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioWrong(f"{path} is not TOML: {error}") from error
    return parse_scenario(tree, str(path))


def parse_scenario(tree: Any, source: str = "scenario") -> Scenario:
    """Check a parsed file. Raises ScenarioWrong."""
    try:
        return Scenario.model_validate(tree)
    except ValidationError as error:
        raise ScenarioWrong("\n".join(_words(source, one) for one in error.errors(include_url=False))) from error


def _words(source: str, error: Any) -> str:
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{source}: there is no key {place}: remove it, or look at docs/simulate.md for its name"
    if error["type"] == "missing":
        return f"{source}: {place} is missing: give it"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{source}: {message}"
    return f"{source}: {place} is {error['input']!r}: {message[:1].lower()}{message[1:]}"

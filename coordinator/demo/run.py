"""`echo2 demo`: makes the model, starts everything on loopback, shows it live, writes the report and the picture."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.live import Live

from coordinator.commands.connection import Connection, find
from coordinator.commands.job_file import check_reward_code, upload_names
from coordinator.commands.output import console, errors, show_json
from coordinator.demo import market, picture, report
from coordinator.demo.churn import Change, churn, longest_absence, one_kill
from coordinator.demo.job import RECIPES, DemoOptions, demo_job, recipe_of
from coordinator.demo.processes import Child, DemoFailed, program
from coordinator.demo.view import ages, progress, view
from coordinator.rest_client import RequestFailed, RestClient

READY_S = 60.0
JOINED_S = 180.0  # torch takes its time to be imported on a busy machine
POLL_S = 0.5
SAY_S = 10.0  # between two lines of progress where there is no terminal
LIMIT_S = 6 * 3600.0
PRICES = (0.12, 0.20, 0.35, 0.00, 0.48, 0.27)  # USD per hour; one volunteer
ENDED = ("completed", "failed", "cancelled")
REASONS = {"no_signal": "in groups whose rewards were all equal (no_signal)"}
SERIES = ("reward/all/mean", "eval/all/mean", "time/step", "time/wait_for_batch", "publish/bytes_full")


def run_demo(options: DemoOptions) -> None:
    """Run it; exit code 1 when the job did not complete, 128 plus the signal's number when a signal ended it."""
    check_options(options)
    if options.market:
        options = replace(options, workers=len(market.CAST))
    out = options.out.resolve()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    with owned(out) as work:
        say = errors if options.as_json else console
        told = _train(options, work, say)
        result = report.build(told)
        (out / "report.json").write_text(json.dumps(result, indent=2) + "\n")
        picture.draw(result, told.series, out / "report.png")
    _say(result, out, options, say)
    if result["state"] != "completed":
        raise typer.Exit(1)


def check_options(options: DemoOptions) -> None:
    """Everything that can be known to be wrong before any time is spent. Raises DemoFailed or JobFileWrong."""
    if options.market and (options.churn or options.kill_a_worker):
        raise DemoFailed("--market has a script of its own: leave --churn and --kill-a-worker out")
    if options.model is not None and not (options.model / "config.json").is_file():
        raise DemoFailed(f"--model {options.model} is no Hugging Face directory: it holds no config.json")
    if options.train is not None and not options.train.is_file():
        raise DemoFailed(f"--train {options.train} does not exist: name a JSONL or Parquet file with a row for each prompt")
    _check_recipe(options)
    kind, _, rest = options.environment.partition(":")
    name, _, function = rest.rpartition(":")
    if options.environment not in (*RECIPES, "math") and not (kind == "python" and name and function):
        raise DemoFailed(f"--environment {options.environment!r} must be {', '.join(RECIPES)}, math or python:FILE:FUNCTION")
    if options.environment in RECIPES and options.train is not None:
        raise DemoFailed(
            f"--train {options.train} is not used: {options.environment} makes its own problems. Leave it out, or give --environment"
        )
    if options.environment not in RECIPES and options.train is None:
        raise DemoFailed(f"--environment {options.environment} needs prompts: name a JSONL or Parquet file with --train")
    if kind == "python":
        if not Path(name).is_file():
            raise DemoFailed(f"--environment {options.environment}: there is no file {name} here")
        check_reward_code(Path(name), function, where="--environment")


def _check_recipe(options: DemoOptions) -> None:
    """A toy is taught one task; with a brought model only the environment counts."""
    recipe_of(options.recipe)
    if options.model is None and options.environment in RECIPES and options.environment != options.recipe:
        raise DemoFailed(
            f"--environment {options.environment} is not what the toy of --recipe {options.recipe} was taught: "
            f"use --recipe {options.environment}, or bring a model with --model"
        )


@contextmanager
def owned(out: Path) -> Iterator[Path]:
    """An empty work folder in `out`, for this run alone. Only what a demo made before is removed."""
    work = out / "work"
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise DemoFailed(f"--out {out} cannot be used: {error.strerror}; choose another folder") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if work.exists() and any(work.iterdir()) and not any((work / name).exists() for name in ("model.log", "coordinator.log")):
            raise DemoFailed(f"{work} is not from a demo and would be overwritten: choose another folder with --out")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        yield work
    except BlockingIOError as error:
        raise DemoFailed(f"another demo runs in {out}: wait for it, or choose another folder with --out") from error
    finally:
        os.close(folder)


def _train(options: DemoOptions, work: Path, say: Any) -> report.Told:
    children: list[Child] = []
    try:
        model = options.model.resolve() if options.model else _make_model(work / "model", options, say)
        return asyncio.run(_Demo(options, work, model, children).run())
    except KeyboardInterrupt:
        say.print(f"stopped; no report is written, logs are in {work}", soft_wrap=True)
        raise
    finally:
        _end(children)


def _leave(number: int, _frame: object) -> None:
    """A signal that would end this process must not leave its children behind."""
    raise SystemExit(128 + number)


def _end(children: Sequence[Child]) -> None:
    """Workers first, all at once, so that they can take their leave; the coordinator last. It takes seconds and is not interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    workers = [child for child in children if child.name != "coordinator"]
    for child in workers:
        child.ask_to_end()
    for child in [*workers, *(child for child in children if child.name == "coordinator")]:
        child.end()


def _make_model(directory: Path, options: DemoOptions, say: Any) -> Path:
    """The recipe's toy, trained from scratch by its own command."""
    recipe = recipe_of(options.recipe)
    say.print(recipe.says)
    command = [
        str(Path(program("echo2")).parent / "python"),
        "-m",
        "coordinator.learner.warm_start",
        "--out",
        str(directory),
        "--seed",
        str(options.seed + 1),
        "--recipe",
        options.recipe,
    ]
    child = Child("model", command, directory.parent / "model.log")
    try:
        with say.status(f"this takes about {recipe.made_in_s} s"):
            while child.ended is None:
                time.sleep(POLL_S)
    finally:
        child.end()
    if child.ended != 0:
        raise DemoFailed(f"the model could not be made: {child.last_words()}; its log is {child.log}")
    say.print(f"  {child.last_words()}")
    return directory


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class _Demo:
    """The processes and what is read from them."""

    def __init__(self, options: DemoOptions, work: Path, model: Path, children: list[Child]) -> None:
        self._options = options
        self._work = work
        self._model = model
        self._children = children
        self._say = errors if options.as_json else console
        self._said_at_s = -SAY_S
        self._workers: dict[int, Child] = {}  # by place
        self._away: set[str] = set()  # killed, and not back
        self._plan = churn(options.workers, options.steps, options.seed) if options.churn else []
        self._plan += one_kill(options.steps) if options.kill_a_worker else []
        self._changes: list[Change] = []  # those that were made
        self._acts: list[market.Act] = []
        self._active: dict[int, tuple[str, ...]] = {}
        self._seen: Mapping[str, Any] = {"jobs": []}
        self._code = ""

    async def run(self) -> report.Told:
        begun = time.monotonic()
        self._serve()
        connection = await self._ready()
        async with connection.client() as client:
            job = demo_job(self._options, str(self._model))
            await upload_names(client, job, Path.cwd())
            job_id = (await client.post("/jobs", job))["id"]
            invite = await client.post("/invites", {"max_uses": self._options.workers, "owner": "demo", "jobs": [job_id]})
            self._code = invite["code"]
            for place in range(self._options.workers):
                self._join(place, connection)
            with Live(console=self._say, refresh_per_second=4) if self._say.is_terminal else nullcontext() as live:
                await self._follow(client, connection, job_id, live, begun)
            return await self._told(client, job_id, time.monotonic() - begun)

    def _serve(self) -> None:
        command = [program("echo2"), "serve", "--data-dir", str(self._work / "coordinator"), "--port", "0", "--tls", "self-signed"]
        variables = {"ECHO2_HEARTBEAT_S": "2", "ECHO2_PEER_NETWORKS": '["127.0.0.0/8"]'}
        if self._options.market:
            variables["ECHO2_LEARNER_LEAST_STEP_S"] = f"{market.STEP_S:g}"
        self._children.append(Child("coordinator", command, self._work / "coordinator.log", variables))

    async def _ready(self) -> Connection:
        home = self._work / "coordinator"
        until = time.monotonic() + READY_S
        while not (home / "serve.json").exists():
            if self._children[0].ended is not None or time.monotonic() > until:
                raise DemoFailed(f"the coordinator did not start: {self._children[0].last_words()}")
            await asyncio.sleep(0.1)
        return find(None, None, home)

    def _join(self, place: int, connection: Connection) -> None:
        name = f"worker-{place + 1}"
        cast = market.CAST[place % len(market.CAST)] if self._options.market else None
        price = PRICES[place % len(PRICES)] if cast is None else cast.usd_per_hour
        command = [program("echo2-worker"), "join", connection.url, "--name", name, "--price", f"{price:.2f}"]
        command += ["--state-dir", str(self._work / name), "--engine", "torch"]
        if cast is not None:
            command += ["--slots", str(market.SLOTS), "--throttle", f"{cast.tokens_per_s:g}"]
        command += ["--peer-host", "127.0.0.1", "--peer-port", str(free_port())]
        if self._options.link_mbit:
            command += ["--up-mbit", f"{self._options.link_mbit:g}", "--down-mbit", f"{self._options.link_mbit:g}"]
        child = Child(name, command, self._work / f"{name}.log", {"ECHO2_INVITE": self._code})
        self._children.append(child)
        self._workers[place] = child
        self._away.discard(name)

    async def _follow(self, client: RestClient, connection: Connection, job_id: str, live: Live | None, begun: float) -> None:
        until = time.monotonic() + LIMIT_S
        while True:
            job = await client.get(f"/jobs/{job_id}")
            workers = (await client.get("/workers"))["workers"]
            series = {name: await _points(client, job_id, name) for name in SERIES}
            elapsed_s = time.monotonic() - begun
            if live is not None:
                live.update(view(job, workers, series, elapsed_s=elapsed_s, killed=self._away))
            elif elapsed_s - self._said_at_s >= SAY_S or job["state"] in ENDED:
                self._said_at_s = elapsed_s
                self._say.print(progress(job, series["reward/all/mean"], elapsed_s))
            if job["state"] in ENDED:
                return
            if job["state"] == "paused":
                raise DemoFailed(f"the job paused itself: {job['reason']}")
            if not workers and time.monotonic() - begun > JOINED_S:
                raise DemoFailed(
                    f"no worker joined within {JOINED_S:.0f} s: {self._workers[0].last_words()}; logs are in {self._work}"
                )
            self._make_changes(job["committed_steps"], connection)
            if self._options.market:
                self._play(job["committed_steps"], await client.get("/market"))
            self._check_children(until)
            await asyncio.sleep(POLL_S)

    def _make_changes(self, step: int, connection: Connection) -> None:
        """Kill and bring back whoever is due."""
        due = [change for change in self._plan if change.step <= step]
        self._plan = [change for change in self._plan if change.step > step]
        for change in due:
            child = self._workers[change.place]
            if change.kind == "kill":
                self._away.add(child.name)
                child.kill()
                self._children.remove(child)
            else:
                self._join(change.place, connection)
            self._changes.append(replace(change, step=step))

    def _play(self, step: int, seen: Mapping[str, Any]) -> None:
        """The script of the market demo: note who is active; kill one at its step, and have another one ask for more at its own."""
        active = market.active_now(seen)
        if not active:
            return
        self._active[step], self._seen = active, seen
        if self._acts and not self._acts[-1].is_answered and self._acts[-1].worker not in active:
            self._acts[-1] = replace(self._acts[-1], after=active)
        share = step / self._options.steps
        if not self._acts and market.may_kill(seen, share):
            name = market.fastest(seen)
            child = next(child for child in self._children if child.name == name)
            self._away.add(name)
            child.kill()
            self._children.remove(child)
            self._acts.append(market.Act("kill", step, name, active))
            self._changes.append(Change(step, int(name.rpartition("-")[2]) - 1, "kill"))
        elif len(self._acts) == 1 and market.may_raise(self._acts[0], seen, share):
            name = market.cheapest(seen)
            price = market.RAISED * market.CAST[int(name.rpartition("-")[2]) - 1].usd_per_hour
            command = [program("echo2-worker"), "price", f"{price:.2f}", "--state-dir", str(self._work / name)]
            Child(f"{name}-price", command, self._work / f"{name}-price.log").wait()
            self._acts.append(market.Act("raise", step, name, active))

    def _check_children(self, until: float) -> None:
        if time.monotonic() > until:
            raise DemoFailed(f"the demo did not end within {LIMIT_S:.0f} s; logs are in {self._work}")
        for child in self._children:
            if child.ended is not None:
                raise DemoFailed(f"{child.name} ended with code {child.ended}: {child.last_words()}; its log is {child.log}")

    async def _told(self, client: RestClient, job_id: str, wall_s: float) -> report.Told:
        job = await client.get(f"/jobs/{job_id}")
        pool = (await client.get("/workers"))["workers"]
        workers = [await client.get(f"/workers/{worker['id']}") for worker in sorted(pool, key=lambda w: str(w["name"]))]
        names = (*SERIES, *(f"publish/{name}" for name in report.PUBLISH))
        series = {name: await _points(client, job_id, name) for name in names}
        audit = await client.get(f"/jobs/{job_id}/audit")
        kills = sum(change.kind == "kill" for change in self._changes)
        played = await self._played(client, job_id, series) if self._options.market else None
        churned = report.Churned(frozenset(self._away), kills, len(self._changes) - kills, longest_absence(self._changes))
        return report.Told(job, workers, series, audit, wall_s, churned, played)

    async def _played(self, client: RestClient, job_id: str, series: dict[str, list[tuple[int, float]]]) -> market.Played:
        for name in market.SERIES:
            series[name] = await _points(client, job_id, name)
        history = await client.get("/market/history", {"limit": 2000})
        return market.Played(tuple(self._acts), self._seen, history, series, dict(self._active))


async def _points(client: RestClient, job_id: str, name: str) -> list[tuple[int, float]]:
    try:
        reply = await client.get(f"/jobs/{job_id}/metrics", {"name": name, "limit": 10000})
    except RequestFailed as failed:
        if failed.status == 404:
            return []
        raise
    return [(point["step"], point["value"]) for point in reply["points"] if point["value"] is not None]


def _say(result: Mapping[str, Any], out: Path, options: DemoOptions, say: Any) -> None:
    if options.as_json:
        show_json(result)
        return
    if result["state"] != "completed":
        say.print(f"the job is {result['state']}: {result['reason']}")
        return
    for line in summary(result):
        say.print(line)
    say.print(f"report: {out / 'report.json'}\npicture: {out / 'report.png'}", soft_wrap=True)


def _market_words(told: Mapping[str, Any] | None) -> Sequence[str]:
    """What the market did, in two lines; none in a demo without it."""
    if told is None:
        return ()

    def shown(value: float | None, style: str) -> str:
        return "not measured" if value is None else format(value, style)

    acts = "; ".join(
        f"step {act['step']}: {act['kind']} {act['worker']}, active {', '.join(act['before'])} -> {', '.join(act['after']) or 'not answered'}"
        for act in told["acts"]
    )
    return (
        f"market: {acts or 'no act was played: give it more steps'}",
        f"learner idle {shown(told['predicted_idle'], '.1%')} predicted, {shown(told['measured_idle'], '.1%')} measured over the last "
        f"{told['steps_compared']} steps; ${shown(told['usd_per_thousand'], '.4f')} per 1,000 admitted rollouts, "
        f"${shown(told['usd_per_thousand_all_on'], '.4f')} with all {told['workers']} workers on",
    )


def summary(result: Mapping[str, Any]) -> Sequence[str]:
    """The report in a few lines."""

    def shown(value: float | None, style: str = ".3f") -> str:
        return "not measured" if value is None else format(value, style)

    rejected = ", ".join(f"{count} {REASONS.get(reason, reason)}" for reason, count in result["rejected"].items()) or "none"
    ends = result["reward_ends_steps"]
    first_and_last = f"first and last {ends} steps" if ends > 1 else "first and last step"
    killed = f"; {result['killed_worker']} was killed on the way" if result["killed_worker"] else ""
    if result["rejoins"]:
        killed = (
            f"; {result['kills']} times a worker was killed and {result['rejoins']} times one came back, after {result['longest_absence']} "
            f"steps at most; everyone alive ended {result['versions_behind']} versions behind at most"
        )
    publish = {name: shown(value, ".2f") for name, value in result["publish_median"].items()}
    return (
        f"reward {shown(result['reward_first10'])} -> {shown(result['reward_last10'])} (sampled, {first_and_last}); "
        f"greedy held-out {shown(result['greedy_before'])} -> {shown(result['greedy_after'])}",
        f"staleness at most {result['max_staleness']} of {result['S']} allowed; groups by age {ages(result['staleness_histogram'])}",
        f"learner busy {shown(result['learner_utilisation'], '.0%')}; {result['workers_contributing']} workers contributed{killed}; "
        f"{result['admitted']} rollouts trained; not trained: {rejected}",
        f"weights {result['bytes_to_workers'] / 1e6:.1f} MB to workers, {result['bytes_from_peers'] / 1e6:.1f} MB of them from peers, "
        f"{shown(result['bytes_saved'] and result['bytes_saved'] / 1e6, '.1f')} MB less than full snapshots",
        f"a version reached its last worker {publish['to_last_worker_s']} s after publication (medians: encoding {publish['encode_s']} s, "
        f"the first piece out after {publish['first_piece_s']} s; slowest transfer {publish['transfer_s']} s, apply {publish['apply_s']} s)",
        *_market_words(result["market"]),
        f"simulated cost ${result['simulated_cost_usd']:.4f}; audit {'sound' if result['audit_ok'] else 'BROKEN'}; {result['wall_s']:.0f} s",
    )

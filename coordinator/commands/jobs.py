"""What `echo2 job` and `echo2 audit` do and show."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from coordinator.commands.connection import Connection
from coordinator.commands.job_file import JobFileWrong, missing_names, read_job, submit_with_uploads
from coordinator.commands.output import console, counts, dollars, errors, figure, show_json, show_table, when
from coordinator.errors import CoordinatorError
from coordinator.rest_client import RequestFailed, RestClient

MOST_UNANSWERED = 300  # leased or issued rollouts of a running job, newest of all
ENDED = ("completed", "failed", "cancelled")


def submit(connection: Connection, file: Path, overrides: Sequence[str], *, upload: bool, as_json: bool) -> None:
    """Validate here, upload, submit."""
    tree = read_job(file, overrides)

    base = file.resolve().parent
    missing = missing_names(tree, base)

    async def action(client: RestClient) -> tuple[list[str], Any]:
        try:
            return await submit_with_uploads(client, tree, base) if upload else ([], await client.post("/jobs", tree))
        except RequestFailed as refused:
            if refused.code != "name_not_allowed" or not missing:
                raise
            raise JobFileWrong(
                f"{file}: {', '.join(map(repr, missing))} is neither beside the job file (in {base}) nor inside a folder that the "
                f"operator listed with `echo2 serve --root`: correct the name. The coordinator said: {refused}"
            ) from refused

    sent, job = connection.run(action)
    if as_json:
        show_json(job)
        return
    for name in sent:
        console.print(f"uploaded {name}")
    console.print(f"job {job['id']} is {job['state']}; follow it: echo2 job events {job['id']}")


def change(connection: Connection, job: str, changes: Sequence[str], *, as_json: bool) -> None:
    """PATCH a job from `name=value` words; a budget is changed as a whole, starting from what it is."""
    values = dict(_parsed(change) for change in changes)
    budget = {name.partition(".")[2]: values.pop(name) for name in list(values) if name.startswith("budget.")}

    async def action(client: RestClient) -> Any:
        body = dict(values)
        if budget:
            body["budget"] = (await client.get(f"/jobs/{job}"))["config"]["budget"] | budget
        return await client.patch(f"/jobs/{job}", body)

    result = connection.run(action)
    if as_json:
        show_json(result)
    else:
        show_state(result)
        console.print(f"set: {', '.join(changes)}")


def _parsed(change: str) -> tuple[str, Any]:
    name, equals, text = change.partition("=")
    if not equals:
        raise JobFileWrong(f"change {change!r} does not read name=value, for example staleness_max=4")
    try:
        return name, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return name, text


def follow(connection: Connection, job: str, after: int, *, as_json: bool) -> None:
    """Print events until the job ends; exit code 1 when it failed."""

    async def action(client: RestClient) -> str:
        seen = after
        while True:
            async for event in client.events(job, seen):
                seen = max(seen, int(event["seq"]))
                _show_event(event, as_json=as_json)
            state = str((await client.get(f"/jobs/{job}"))["state"])
            if state in ENDED:
                return state

    if connection.run(action) == "failed":
        raise typer.Exit(1)


def _show_event(event: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        show_json(event)
        return
    shown = {name: _reading(value) if isinstance(value, float) else value for name, value in event["data"].items()}
    data = ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)
    console.print(f"{when(event['at'])}  {event['seq']:>5}  {event['kind']}  {data}")


def show_list(reply: Any) -> None:
    """The list of jobs."""
    rows = (
        (
            j["id"],
            j["name"],
            j["state"],
            f"{j['committed_steps']}/{j['planned_steps']}",
            figure((j["reward"] or {}).get("value")),
            j["reason"],
        )
        for j in reply["jobs"]
    )
    show_table("Jobs", ("id", "name", "state", "step", "reward", "reason"), rows)


def show_state(job: Any) -> None:
    """One line."""
    reason = f": {job['reason']}" if job["reason"] else ""
    doing = f" ({job['doing']})" if job["doing"] else ""
    console.print(f"job {job['id']} is {job['state']}{doing}{reason}", soft_wrap=True)


def show_job(job: Any) -> None:
    """What an operator asks first."""
    show_state(job)
    for warning in job["warnings"]:
        console.print(f"  {warning}", soft_wrap=True)
    staleness, learner, work = job["staleness"], job["learner"], job["work"]
    highest = "none yet" if staleness["highest"] is None else f"highest {staleness['highest']}"
    rows = (
        ("step", f"{job['committed_steps']} of {job['planned_steps']}"),
        ("reward (sampled)", figure((job["reward"] or {}).get("value")) or "none yet"),
        ("held-out", figure((job["eval"] or {}).get("value")) or "none yet"),
        ("newest version", job["newest_version"]),
        ("staleness", f"{highest}, bound {staleness['bound']}; groups by age: {counts(staleness['histogram'])}"),
        ("learner busy", "" if learner["utilisation"] is None else f"{learner['utilisation']:.0%}"),
        ("workers serving", "" if job["state"] in ENDED else work["workers_serving"]),
        ("groups", counts(work["groups"])),
        ("rollouts not trained", counts(work["rejected"])),
        ("rollouts refused", counts(work["refused"])),
        ("spent, reserved", f"{dollars(job['spent_uusd'])}, {dollars(job['reserved_uusd'])}"),
    )
    show_table(job["name"], ("what", "figure"), rows)


def rollouts_query(step: int | None, limit: int) -> dict[str, int]:
    """What to ask for: without a step also the newest that nobody answered yet come back, and are not shown."""
    return {"limit": min(limit + MOST_UNANSWERED, 500)} if step is None else {"limit": limit, "step": step}


def show_rollouts(reply: Any, limit: int) -> None:
    """Prompts, completions, rewards; why a reward is absent."""
    answered = [r for r in reply["rollouts"] if r["accepted_at"] is not None]
    rows = (
        (
            f"{r['group_number']}/{r['slot']}",
            r["step"],
            r["prompt"],
            r["completion"],
            figure(r["reward"]),
            "; ".join(words for words in (r["outcome"], r["detail"]) if words),
            r["oldest_version"],
        )
        for r in answered[:limit]
    )
    show_table("Rollouts", ("group/slot", "step", "prompt", "completion", "reward", "outcome", "version"), rows)


def _reading(value: float | None) -> str:
    """A figure of any size: a learning rate of 1e-6 must not read 0."""
    return "" if value is None else f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"


def show_metrics(reply: Any) -> None:
    """Names with newest values, or the points of one."""
    if reply["name"] is not None and not reply["points"]:
        raise CoordinatorError(f"there is no metric {reply['name']!r} yet; without a name `echo2 job metrics JOB` lists all")
    if reply["name"] is None:
        show_table("Metrics", ("name", "step", "value"), ((m["name"], m["step"], _reading(m["value"])) for m in reply["names"]))
        return
    show_table(reply["name"], ("step", "at", "value"), ((p["step"], when(p["at"]), _reading(p["value"])) for p in reply["points"]))


def show_checkpoints(reply: Any) -> None:
    """Versions."""
    rows = (
        (c["version"], c["source"], when(c["at"]), c["digest"][:16], sum(f["bytes"] for f in c["files"]))
        for c in reply["checkpoints"]
    )
    show_table("Checkpoints", ("version", "source", "at", "digest", "bytes"), rows)


def download(connection: Connection, job: str, version: int, out: Path, *, part: str = "files") -> None:
    """All files of a version into a folder; `part` adapter: those of its adapters alone."""

    async def action(client: RestClient) -> int:
        found = (await client.get(f"/jobs/{job}/checkpoints"))["checkpoints"]
        entry = next((c for c in found if c["version"] == version), None)
        if entry is None:
            known = ", ".join(str(c["version"]) for c in found) or "none"
            raise CoordinatorError(f"job {job} has no version {version} on the coordinator; there are: {known}")
        names = [f["name"] for f in entry.get(part, ())]
        if not names:
            raise CoordinatorError(f"version {version} of job {job} has no {part}: only jobs with [lora] have adapters")
        if strange := [name for name in names if Path(name).name != name or name in ("", ".", "..")]:
            raise CoordinatorError(f"the coordinator names a file {strange[0]!r}, which is no plain name: nothing was written")
        try:
            out.mkdir(parents=True, exist_ok=True)
            return sum([await client.download(f"/jobs/{job}/checkpoints/{version}/{name}", out / name) for name in names])
        except OSError as error:
            raise CoordinatorError(f"--out {out} cannot be written: {error.strerror}; choose another folder") from error

    with errors.status(f"downloading version {version}"):
        size = connection.run(action)
    console.print(f"{size} bytes in {out}", soft_wrap=True)


def show_audit(result: Any, *, as_json: bool) -> None:
    """The proof, or what breaks it (exit code 1)."""
    if as_json:
        show_json(result)
    else:
        counts = ", ".join(f"{name} {count}" for name, count in result["counts"].items())
        console.print(f"{'sound' if result['ok'] else 'BROKEN'}: {counts}")
        for finding in result["findings"]:
            console.print(f"  {finding}")
    if not result["ok"]:
        raise typer.Exit(1)

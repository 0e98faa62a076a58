"""What `echo2 job` and `echo2 audit` do and show."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from coordinator.commands.connection import Connection
from coordinator.commands.job_file import JobFileWrong, read_job, upload_names
from coordinator.commands.output import console, dollars, figure, show_json, show_table, when
from coordinator.errors import CoordinatorError
from coordinator.rest_client import RestClient

ENDED = ("completed", "failed", "cancelled")


def submit(connection: Connection, file: Path, overrides: Sequence[str], *, upload: bool, as_json: bool) -> None:
    """Validate here, upload, submit."""
    tree = read_job(file, overrides)

    async def action(client: RestClient) -> tuple[list[str], Any]:
        sent = await upload_names(client, tree, file.resolve().parent) if upload else []
        return sent, await client.post("/jobs", tree)

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
    data = ", ".join(f"{name}={value}" for name, value in event["data"].items() if value is not None)
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
    console.print(f"job {job['id']} is {job['state']}{reason}")


def show_job(job: Any) -> None:
    """What an operator asks first."""
    show_state(job)
    staleness, learner, work = job["staleness"], job["learner"], job["work"]
    rows = (
        ("step", f"{job['committed_steps']} of {job['planned_steps']}"),
        ("reward (sampled)", figure((job["reward"] or {}).get("value"))),
        ("held-out", figure((job["eval"] or {}).get("value"))),
        ("newest version", job["newest_version"]),
        ("staleness", f"highest {staleness['highest']}, bound {staleness['bound']}, {staleness['histogram']}"),
        ("learner utilisation", figure(learner["utilisation"])),
        ("workers serving", work["workers_serving"]),
        ("groups", work["groups"]),
        ("refused", work["refused"]),
        ("cost so far (asked prices)", dollars(job["cost_estimate_uusd"])),
    )
    show_table(job["name"], ("what", "figure"), rows)


def show_rollouts(reply: Any) -> None:
    """Prompts, completions, rewards."""
    rows = (
        (
            f"{r['group_number']}/{r['slot']}",
            r["step"],
            r["prompt"],
            r["completion"],
            figure(r["reward"]),
            r["outcome"],
            r["oldest_version"],
        )
        for r in reply["rollouts"]
    )
    show_table("Rollouts", ("group/slot", "step", "prompt", "completion", "reward", "outcome", "version"), rows)


def show_metrics(reply: Any) -> None:
    """Names with newest values, or the points of one."""
    if reply["name"] is None:
        show_table("Metrics", ("name", "step", "value"), ((m["name"], m["step"], figure(m["value"], 5)) for m in reply["names"]))
        return
    show_table(reply["name"], ("step", "at", "value"), ((p["step"], when(p["at"]), figure(p["value"], 5)) for p in reply["points"]))


def show_checkpoints(reply: Any) -> None:
    """Versions."""
    rows = (
        (c["version"], c["source"], when(c["at"]), c["digest"], sum(f["bytes"] for f in c["files"])) for c in reply["checkpoints"]
    )
    show_table("Checkpoints", ("version", "source", "at", "digest", "bytes"), rows)


def download(connection: Connection, job: str, version: int, out: Path) -> None:
    """All files of a version into a folder."""

    async def action(client: RestClient) -> int:
        found = (await client.get(f"/jobs/{job}/checkpoints"))["checkpoints"]
        entry = next((c for c in found if c["version"] == version), None)
        if entry is None:
            known = ", ".join(str(c["version"]) for c in found) or "none"
            raise CoordinatorError(f"job {job} has no version {version} on the coordinator; there are: {known}")
        names = [f["name"] for f in entry["files"]]
        if strange := [name for name in names if Path(name).name != name or name in ("", ".", "..")]:
            raise CoordinatorError(f"the coordinator names a file {strange[0]!r}, which is no plain name: nothing was written")
        out.mkdir(parents=True, exist_ok=True)
        return sum([await client.download(f"/jobs/{job}/checkpoints/{version}/{name}", out / name) for name in names])

    console.print(f"{connection.run(action)} bytes in {out}")


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

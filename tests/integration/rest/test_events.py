"""Server-sent events: in order, resumable, live, and ended."""

from __future__ import annotations

import asyncio
import json

from coordinator.api.rest_table import RestLimits
from coordinator.domain.model import Event, Job, JobState

EVENTS = "/api/v1/jobs/j-1/events"


async def _read(response, events):
    """Parsed blocks of the stream: (id, event, data), comments as ("", "", text)."""
    found = []
    while len(found) < events:
        block = (await asyncio.wait_for(response.content.readuntil(b"\n\n"), 5)).decode()
        if block.startswith(":"):
            found.append(("", "", block.strip()))
            continue
        fields = dict(line.split(": ", 1) for line in block.strip().split("\n"))
        found.append((fields["id"], fields["event"], json.loads(fields["data"])))
    return found


async def test_a_stream_sends_what_was_and_what_comes(bench, seeded):
    await bench.put(*seeded("someone"))
    async with bench.client.get(EVENTS, headers=bench.headers("viewer")) as response:
        assert response.content_type == "text/event-stream"
        old = await _read(response, 5)
        assert [event[0] for event in old] == ["1", "2", "3", "4", "5"]
        assert old[1][1:] == ("step_committed", {"at": old[1][2]["at"], "step": 2})
        await bench.put(Event("j-1", 6, 1.0, "paused", {"reason": "two\nlines"}))
        bench.deps.wake.notify("j-1")
        assert (await _read(response, 1))[0] == ("6", "paused", {"at": 1.0, "reason": "two\nlines"})


async def test_a_stream_resumes_after_the_last_event_seen(bench, seeded):
    await bench.put(*seeded("someone"))
    async with bench.client.get(EVENTS, headers={**bench.headers(), "Last-Event-ID": "3"}) as response:
        assert [event[0] for event in await _read(response, 2)] == ["4", "5"]


async def test_a_quiet_stream_beats(make_bench, seeded):
    bench = await make_bench(limits=RestLimits(heartbeat_s=0.05))
    await bench.put(*seeded("someone"))
    async with bench.client.get(EVENTS, headers={**bench.headers(), "Last-Event-ID": "5"}) as response:
        assert await _read(response, 2) == [("", "", ": heartbeat")] * 2


async def test_the_stream_of_an_ended_job_ends_and_is_not_reopened(bench, seeded):
    job, *rows = seeded("someone")
    ended = Job(**{**{f: getattr(job, f) for f in job.__slots__}, "state": JobState.COMPLETED})
    await bench.put(ended, *rows)
    async with bench.client.get(EVENTS, headers=bench.headers()) as response:
        assert (await asyncio.wait_for(response.read(), 5)).count(b"id: ") == 5
    async with bench.client.get(EVENTS, headers={**bench.headers(), "Last-Event-ID": "5"}) as response:
        assert response.status == 204


async def test_streams_are_bounded_and_end_at_shutdown(make_bench, seeded):
    bench = await make_bench(limits=RestLimits(streams_at_once=1))
    await bench.put(*seeded("someone"))
    async with bench.client.get(EVENTS, headers=bench.headers()) as response:
        await _read(response, 5)
        assert (await bench.ask("GET", EVENTS, status=503))["code"] == "too_many_streams"
        async with asyncio.timeout(5):
            await bench.client.server.close()


async def test_an_id_that_is_none(bench, seeded):
    await bench.put(*seeded("someone"))
    for text in ("-1", "x", "9" * 19, "1.5"):
        problem = await bench.ask("GET", EVENTS, headers={"Last-Event-ID": text}, status=422)
        assert (problem["code"], problem["field"]) == ("last_event_id_malformed", "Last-Event-ID")

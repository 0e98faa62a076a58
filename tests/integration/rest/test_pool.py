"""Workers and invites as operators see and steer them."""

from __future__ import annotations

from coordinator.domain.model import Holding, Invite, Lease, LeaseState, Rollout, RolloutState, Worker, WorkerState
from coordinator.service import invites
from coordinator.wire.signing import public_hex

WORKERS = "/api/v1/workers"
INVITES = "/api/v1/invites"


async def test_the_pool_and_one_worker(bench, seeded):
    await bench.put(*seeded("someone"))
    line = (await bench.ask("GET", WORKERS, role="viewer"))["workers"][0]
    assert (line["id"], line["state"], line["version"], line["accepted_rollouts"], line["live_leases"]) == (
        "w-1",
        "active",
        1,
        4,
        0,
    )
    worker = await bench.ask("GET", f"{WORKERS}/w-1", status=200)
    assert worker["active_s"] == 36.0
    assert worker["earned_uusd"] == 0, "nothing was quoted, so nothing is owed"
    assert worker["accepted_tokens"] == 20
    assert [holding["version"] for holding in worker["holdings"]] == [1]
    assert (await bench.ask("GET", f"{WORKERS}?state=gone"))["workers"] == []
    assert (await bench.ask("GET", f"{WORKERS}/w-2", status=404))["code"] == "unknown_worker"


async def test_drain_quarantine_release(bench, seeded):
    await bench.put(*seeded("someone"))
    lease = Lease("l-9", "j-1", "g-0", "w-1", 1, (0,), 1, "d" * 64, 3, 2e9, 1, LeaseState.LIVE, 1.0)
    await bench.put(lease, Rollout("g-9", 0, "j-1", 9, RolloutState.LEASED, "l-9", "w-1"))
    drained = await bench.ask("POST", f"{WORKERS}/w-1/drain", json={"reason": "moving house"}, status=200)
    assert (drained["state"], drained["reason"]) == ("draining", "drained by admin: moving house")
    assert drained["live_leases"] == 1
    with bench.deps.wake.watch("j-1") as watch:
        held = await bench.ask("POST", f"{WORKERS}/w-1/quarantine", status=200)
        assert await watch.wait(0.0)
    assert (held["state"], held["live_leases"], held["holdings"]) == ("quarantined", 0, [])
    slot = await bench.deps.store.read(lambda r: r.get(Rollout, "g-9", 0))
    assert slot.state is RolloutState.OPEN
    assert await bench.deps.store.read(lambda r: r.count(Holding, worker_id="w-1")) == 0
    released = await bench.ask("POST", f"{WORKERS}/w-1/release", status=200)
    assert (released["state"], released["strikes"]) == ("gone", 0), "it joins again, in a session of its own"
    assert released["sessions"][0]["ended_at"] is not None, "nothing is paid for a quarantine"
    assert (await bench.ask("POST", f"{WORKERS}/w-1/release", status=409))["code"] == "illegal_state"


async def test_a_worker_that_is_gone_cannot_be_drained(bench, seeded):
    worker = next(row for row in seeded("someone") if isinstance(row, Worker))
    await bench.put(Worker(**{**{f: getattr(worker, f) for f in worker.__slots__}, "state": WorkerState.GONE}))
    await bench.ask("POST", f"{WORKERS}/w-1/drain", status=409)


async def test_an_invite_pins_the_coordinator_and_its_code_is_not_stored(bench):
    body = {"owner": "alice", "max_uses": 2, "expires_in_s": 3600, "price_ceiling_uusd_per_hour": 500_000, "jobs": ["j-1"]}
    made = await bench.ask("POST", INVITES, json=body, status=201)
    kind, key, secret = made["code"].split(".")
    assert (kind, key) == ("echo2-invite-1", public_hex(bench.deps.key))
    row = await bench.deps.store.read(lambda r: invites.find(r, made["code"]))
    assert row == Invite(made["id"], row.code_hash, "alice", 2, bench.clock.time, bench.clock.time + 3600, 500_000, ("j-1",))
    assert secret not in row.code_hash
    listed = (await bench.ask("GET", INVITES))["invites"]
    assert [(i["id"], i["used"]) for i in listed] == [(made["id"], 0)]
    assert "code" not in listed[0]


async def test_uses_are_counted_from_workers_and_revoking_twice_is_one(bench, seeded):
    made = await bench.ask("POST", INVITES, json={}, status=201)
    worker = next(row for row in seeded("someone") if isinstance(row, Worker))
    await bench.put(Worker(**{**{f: getattr(worker, f) for f in worker.__slots__}, "invite_id": made["id"]}))
    first = await bench.ask("DELETE", f"{INVITES}/{made['id']}", status=200)
    bench.clock.time += 5
    assert await bench.ask("DELETE", f"{INVITES}/{made['id']}", status=200) == first
    assert first["used"] == 1
    await bench.ask("DELETE", f"{INVITES}/i-0", status=404)


async def test_codes_that_are_none(bench):
    for code in ("", "echo2-invite-1", f"echo2-invite-2.{'a' * 64}.{'b' * 43}", f"echo2-invite-1.{'a' * 64}.{'b' * 43}"):
        assert await bench.deps.store.read(lambda r, code=code: invites.find(r, code)) is None

"""The stand-in's Vast.ai."""

from __future__ import annotations

import re
from typing import Any

from tests.standin.desk import Reply, Request
from tests.standin.world import UUSD, Instance, Machine, World

_ROUTES = (
    ("search", "POST", re.compile(r"/api/v0/bundles/()")),
    ("create", "PUT", re.compile(r"/api/v0/asks/(\d+)/")),
    ("list", "GET", re.compile(r"/api/v1/instances/()")),
    ("get", "GET", re.compile(r"/api/v0/instances/(\d+)/")),
    ("destroy", "DELETE", re.compile(r"/api/v0/instances/(\d+)/")),
)
PAGE = 3  # smaller than the real 25, so that there are several


class VastStandIn:
    schema = "vast"

    def __init__(self, world: World) -> None:
        self.world = world

    def operation(self, request: Request) -> tuple[str, str] | None:
        for name, method, pattern in _ROUTES:
            found = pattern.fullmatch(request.path)
            if found is not None and method == request.method:
                return name, found[1]
        return None

    def request_schema(self, name: str) -> tuple[str | None, str | None]:
        return {"search": (None, "search_request"), "create": (None, "create_request"), "list": ("list_query", None)}.get(
            name, (None, None)
        )

    def reply_schema(self, name: str, status: int) -> str | None:
        return f"{name}_response" if status == 200 else "error"

    def too_many(self) -> Any:
        return {"detail": "API requests too frequent endpoint threshold=4.5"}

    def refusal(self, status: int, words: str) -> Reply:
        return Reply(status, {"success": False, "error": "invalid_args", "msg": words})

    def carry_out(self, name: str, subject: str, request: Request, body: Any, fault: str | None) -> Reply:
        match name:
            case "search":
                return self._search(body, fault)
            case "create":
                return self._create(int(subject), body, fault)
            case "list":
                return self._list(request.query.get("after_token"), fault)
            case "get":
                one = self.world.find(subject)
                return Reply(200, {"instances": None if one is None else self._instance(one)})
            case _:
                return self._destroy(subject)

    def _search(self, body: Any, fault: str | None) -> Reply:
        most = body.get("dph_total", {}).get("lte", 1e9)
        found = [self._offer(machine) for machine in self.world.free() if machine.uusd_per_hour <= most * UUSD]
        found.sort(key=lambda offer: offer["dph_total"])
        found = found[: body.get("limit", 1000)]
        if fault == "unit confusion" and found:
            found[0]["gpu_ram"] //= 1000  # GB where MB is documented
        if fault == "bad field in an offer" and found:
            found[0]["dph_total"] = "cheap"
        if fault == "offers as a lone object" and found:
            return Reply(200, {"offers": found[0]})
        return Reply(200, {"offers": found})

    def _offer(self, machine: Machine) -> dict[str, Any]:
        return {
            "id": machine.offer_id,
            "ask_contract_id": machine.offer_id,
            "machine_id": machine.machine_id,
            "host_id": 7,
            "gpu_name": machine.card,
            "num_gpus": 1,
            "gpu_ram": machine.vram_mb,
            "dph_total": machine.uusd_per_hour / UUSD,
            "dph_base": machine.uusd_per_hour / UUSD,
            "min_bid": machine.uusd_per_hour / 2 / UUSD,
            "is_bid": False,
            "storage_cost": 0.15,
            "inet_up": 800.0,
            "inet_down": 900.0,
            "inet_up_cost": 0.0012,
            "inet_down_cost": 0.0012,
            "reliability": 0.99,
            "verification": "verified",
            "geolocation": "Sweden, SE",
            "duration": 1e6,
            "rentable": True,
            "rented": False,
            "cpu_cores": None,
        }

    def _create(self, offer_id: int, body: Any, fault: str | None) -> Reply:
        world = self.world
        machine = next((one for one in world.free() if one.offer_id == offer_id), None)
        gone = {
            "success": False,
            "error": "no_such_ask",
            "msg": f"error 404/3603: no_such_ask Instance type by id {offer_id} is not available.",
        }
        if machine is None:
            world.happened["offer was taken"] += 1
            return Reply(404, gone)
        if fault == "offer vanished":
            machine.is_withdrawn = True
            return Reply(410, gone)
        if fault == "no balance":
            return Reply(
                400, {"success": False, "error": "insufficient_credit", "msg": "Your account lacks credit; see the billing page."}
            )
        if fault == "no capacity":
            return Reply(400, {"success": False, "error": "invalid_args", "msg": "error 400/3467: cannot start now"})
        price = machine.uusd_per_hour
        one = world.rent(machine, body.get("label", ""), dict(body.get("env", {})), price)
        if fault == "created, then an error":
            named = {"new_contract": int(one.id)} if world.rng.random() < 0.5 else {}
            return Reply(400, {"success": False, "error": "invalid_price", "msg": "the bid is too low", **named})
        return Reply(200, {"success": True, "new_contract": int(one.id)})

    def _list(self, after: str | None, fault: str | None) -> Reply:
        listed = sorted(self.world.listed(), key=lambda one: int(one.id))
        start = int(after) if after else 0
        page = [one for one in listed if int(one.id) > start][:PAGE]
        more = bool(page) and listed[-1] is not page[-1]
        token = page[-1].id if more else None
        if fault == "a machine left out once" and page:
            page = page[1:]
        records = [self._instance(one) for one in page]
        if fault == "duplicate pages" and len(page) > 1 and more:
            token = page[-2].id  # the next page begins with what this one ends with
        elif fault == "duplicate pages":
            records += records[:1]
        if fault == "bad field in a machine" and records:
            records[0]["dph_total"] = "unknown"
        if fault == "a machine without an id" and records:
            records[0]["id"] = None
        return Reply(
            200,
            {
                "success": True,
                "instances_found": len(records),
                "total_instances": len(listed),
                "next_token": token,
                "instances": records,
            },
        )

    def _instance(self, one: Instance) -> dict[str, Any]:
        now = self.world.now
        status = one.status(now)
        stopped = status == "paused"
        return {
            "id": int(one.id),
            "actual_status": {"starting": "loading", "running": "running", "paused": "exited"}[status],
            "cur_state": "stopped" if stopped else "running",
            "next_state": "stopped" if stopped else "running",
            "intended_status": "stopped" if stopped else "running",
            "label": one.label,
            "status_msg": None,
            "start_date": one.started,
            "end_date": one.started + 1e7,
            "machine_id": one.machine.machine_id,
            "gpu_name": one.machine.card,
            "num_gpus": 1,
            "is_bid": False,
            "dph_total": one.price(now) / UUSD,
        }

    def _destroy(self, subject: str) -> Reply:
        one = self.world.find(subject)
        if one is None:
            return Reply(404, {"success": False, "error": "no_such_instance", "msg": f"Instance {subject} not found."})
        self.world.destroy(one)
        return Reply(200, {"success": True})

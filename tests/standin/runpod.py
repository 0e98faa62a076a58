"""The stand-in's RunPod v2."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from tests.standin.desk import Reply, Request
from tests.standin.world import UUSD, Instance, World

_ROUTES = (
    ("search", "GET", re.compile(r"/v2/catalog/gpus()")),
    ("create", "POST", re.compile(r"/v2/pods()")),
    ("list", "GET", re.compile(r"/v2/pods()")),
    ("get", "GET", re.compile(r"/v2/pods/([a-z0-9]+)")),
    ("destroy", "DELETE", re.compile(r"/v2/pods/([a-z0-9]+)")),
)
_STATUS = {"starting": "STARTING", "running": "RUNNING", "paused": "EXITED"}
_ACTIONS = {"starting": ["stop", "terminate"], "running": ["stop", "restart", "terminate"], "paused": ["start", "terminate"]}


class RunPodStandIn:
    """All machines of a card are one offer; the community cloud has them."""

    schema = "runpod"

    def __init__(self, world: World) -> None:
        self.world = world

    def operation(self, request: Request) -> tuple[str, str] | None:
        for name, method, pattern in _ROUTES:
            found = pattern.fullmatch(request.path)
            if found is not None and method == request.method:
                return name, found[1]
        return None

    def request_schema(self, name: str) -> tuple[str | None, str | None]:
        return {"search": ("catalog_query", None), "create": ("no_query", "create_request")}.get(name, ("no_query", None))

    def reply_schema(self, name: str, status: int) -> str | None:
        if status >= 400:
            return "error"
        return {"search": "catalog_response", "create": "pod", "list": "list_response", "get": "pod"}.get(name)

    def too_many(self) -> Any:
        return _problem(429, "Too Many Requests", "rate limit exceeded for the minute window")

    def refusal(self, status: int, words: str) -> Reply:
        return Reply(status, _problem(status, "Refused", words))

    def carry_out(self, name: str, subject: str, request: Request, body: Any, fault: str | None) -> Reply:
        match name:
            case "search":
                return self._search(fault)
            case "create":
                return self._create(body, fault)
            case "list":
                return self._list(fault)
            case "get":
                one = self._find(subject)
                return self.refusal(404, "pod not found") if one is None else Reply(200, self._pod(one))
            case _:
                return self._destroy(subject)

    def _find(self, pod_id: str) -> Instance | None:
        return self.world.find(pod_id.removeprefix("pod"))

    def _search(self, fault: str | None) -> Reply:
        found = []
        for machine in self.world.machines:
            usd = machine.uusd_per_hour / UUSD
            found.append(
                {
                    "id": machine.card,
                    "name": machine.card.removeprefix("NVIDIA "),
                    "pool": None,
                    "manufacturer": "NVIDIA",
                    "memory": machine.vram_mb // 1000,
                    "secure": False,
                    "community": True,
                    "price": {"secure": usd * 2, "community": usd},
                    "maxCount": {"secure": 0, "community": 4},
                    "availability": "LOW" if machine in self.world.free() else "NONE",
                }
            )
        if fault == "unit confusion":
            found[0]["memory"] *= 1000  # MB where GB is documented
        if fault == "bad field in an offer":
            found[0]["price"] = {"secure": None, "community": "0.3 USD"}
        if fault == "offers as a lone object":
            return Reply(200, {"gpus": found[:1]})
        return Reply(200, {"gpus": found})

    def _create(self, body: Any, fault: str | None) -> Reply:
        world = self.world
        machine = next((one for one in world.free() if one.card == body["gpu"]["id"]), None)
        if machine is None or fault in ("no capacity", "offer vanished"):
            return self.refusal(400, "there are no instances currently available")
        if fault == "no balance":
            return self.refusal(402, "the account balance is too low")
        one = world.rent(machine, body["name"], dict(body.get("env", {})), machine.uusd_per_hour)
        if fault == "created, then an error":
            return self.refusal(world.rng.choice((400, 503)), "the request could not be processed")
        return Reply(201, self._pod(one))

    def _list(self, fault: str | None) -> Reply:
        listed = self.world.listed()
        if fault == "a machine left out once":
            listed = listed[1:]
        pods = [self._pod(one) for one in listed]
        if fault == "duplicate pages":
            pods += pods
        if fault == "bad field in a machine" and pods:
            pods[0]["cost"] = -1
        if fault == "a machine without an id" and pods:
            pods[0]["id"] = None
        return Reply(200, {"pods": pods})

    def _pod(self, one: Instance) -> dict[str, Any]:
        now = self.world.now
        status = one.status(now)
        return {
            "id": f"pod{one.id}",
            "name": one.label,
            "status": _STATUS[status],
            "actions": _ACTIONS[status],
            "image": "worker",
            "args": "",
            "disk": 40,
            "mounts": {},
            "ports": [],
            "env": {},
            "registry": None,
            "cloud": "COMMUNITY",
            "dataCenterId": "US-TX-3",
            "cudaVersion": "12.8",
            "ssh": {"proxy": None, "direct": None},
            "template": None,
            "cost": 0.0 if status == "paused" else one.price(now) / UUSD,
            "locked": False,
            "runtime": {} if status == "running" else None,
            "createdAt": _date(one.started),
            "startedAt": _date(one.runs_at) if status == "running" else None,
            "globalNetworking": {"enabled": False},
            "gpu": {"id": one.machine.card, "count": 1, "vcpuCount": 8, "memory": 32},
        }

    def _destroy(self, subject: str) -> Reply:
        one = self._find(subject)
        if one is None:
            return self.refusal(404, "pod not found")
        self.world.destroy(one)
        return Reply(204)


def _problem(status: int, title: str, detail: str) -> dict[str, Any]:
    return {"title": title, "status": status, "detail": detail}


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")

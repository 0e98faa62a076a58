"""The processes on the hosts of one run: started, spoken to, watched, ended."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.bench.swarm.lines import Message
from tests.bench.swarm.network import NETNS, Network

TICKS = os.sysconf("SC_CLK_TCK")


class RunFailed(Exception):
    """A participant died, was silent for too long, or ended with wrong bytes."""


class Crew:
    """One participant a host, of the module `program`. A context: leaving it ends them."""

    def __init__(self, network: Network, program: str, parts: list[Message], directory: Path) -> None:
        self.network = network
        self._directory = directory
        self._heard: queue.Queue[tuple[int, Message | None]] = queue.Queue()
        self._processes: list[subprocess.Popen[str]] = []
        for host, part in enumerate(parts):
            process = network.start(host, sys.executable, "-m", program, stderr=self._errors(host))
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(host, process), daemon=True).start()
            self.tell(host, "part", part)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            with suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
        for process in self._processes:
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def hosts(self) -> range:
        """All of them."""
        return range(len(self._processes))

    @property
    def workers(self) -> range:
        """All but the seeder."""
        return range(1, len(self._processes))

    def tell(self, host: int, do: str, facts: Mapping[str, object]) -> None:
        """Say something to one participant. Raises RunFailed if it is gone."""
        stdin = self._processes[host].stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps({"do": do, **facts}) + "\n")
            stdin.flush()
        except OSError:
            raise RunFailed(self._last_words(host)) from None

    def gather(self, event: str, hosts: Iterable[int], timeout_s: float) -> dict[int, Message]:
        """The one message of each of these hosts, all of them `event`. Raises RunFailed."""
        missing = set(hosts)
        heard: dict[int, Message] = {}
        deadline = time.monotonic() + timeout_s
        while missing:
            try:
                host, message = self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RunFailed(
                    f"no {event!r} from hosts {sorted(missing)} within {timeout_s:.0f} s; {self._all_words()}"
                ) from None
            if message is None or message["event"] != event:
                raise RunFailed(f"instead of {event!r}: {message}; {self._last_words(host)}")
            heard[host] = message
            missing.discard(host)
        return heard

    def cpu_s(self) -> dict[int, float]:
        """CPU seconds that each host's processes used so far, user and system."""
        inodes = {(NETNS / self.network.namespace(host)).stat().st_ino: host for host in self.hosts}
        spent = dict.fromkeys(self.hosts, 0.0)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with suppress(OSError):
                host = inodes.get((entry / "ns/net").stat().st_ino)
                if host is not None:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    spent[host] += (int(fields[11]) + int(fields[12])) / TICKS
        return spent

    def _listen(self, host: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._heard.put((host, json.loads(line)))
        self._heard.put((host, None))

    def _errors(self, host: int) -> Path:
        return self._directory / f"errors-{host}.txt"

    def _last_words(self, host: int) -> str:
        text = self._errors(host).read_text(errors="replace").strip()
        return f"host {host} said last: {text[-2000:] or 'nothing'}"

    def _all_words(self) -> str:
        said = [self._last_words(host) for host in self.hosts if self._errors(host).stat().st_size]
        return "; ".join(said) or "no host wrote an error"

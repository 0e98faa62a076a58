"""The control: the seeder sends every worker its own copy over plain TLS sockets. Uses none of the product's transfer code.

Its time is known beforehand (N copies through one upload), so a run of it tests the network and the harness.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from pathlib import Path

from blake3 import blake3

from p2p.adapters.tls import self_signed, server_context
from tests.bench.swarm.lines import Message, check, hear, say

READ = 256 * 1024


def seed(part: Message) -> None:
    """Serve the payload to each worker that connects."""
    directory = Path(part["directory"])
    certificate, key, _ = self_signed(directory, [part["address"]])
    context = server_context(certificate, key)
    listener = socket.create_server((part["address"], 0))
    say("ready", port=listener.getsockname()[1])
    hear("meet")
    connections = [context.wrap_socket(listener.accept()[0], server_side=True) for _ in range(part["hosts"] - 1)]
    say("met")
    payload = Path(part["payload"]).read_bytes()
    hear("publish")
    senders = [threading.Thread(target=connection.sendall, args=(payload,)) for connection in connections]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    hear("check")
    check(blake3(payload).hexdigest())


def work(part: Message) -> None:
    """Receive the payload, verify it, put it on disk."""
    say("ready")
    seeder = hear("meet")["hosts"][0]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = context.wrap_socket(socket.create_connection((seeder["address"], seeder["port"])))
    say("met")
    hear("publish")
    target = Path(part["directory"]) / "payload"
    digest = blake3()
    left = part["bytes"]
    with target.open("wb") as out:
        while left:
            data = connection.recv(min(READ, left))
            if not data:
                raise SystemExit(f"the seeder closed with {left} bytes to come")
            digest.update(data)
            out.write(data)
            left -= len(data)
    if digest.hexdigest() != part["digest"]:
        raise SystemExit("the payload has another digest")
    say("done", at=time.monotonic())
    hear("check")
    check(blake3(target.read_bytes()).hexdigest())


def main() -> None:
    """Host 0 seeds."""
    part = hear("part")
    (seed if part["host"] == 0 else work)(part)


if __name__ == "__main__":
    main()

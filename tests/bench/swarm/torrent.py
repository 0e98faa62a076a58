"""The yardstick: libtorrent, told every address; no tracker, DHT, LSD, port mapping or rate limit, TCP only.

The torrent is made before publication, which the product may not do. Traffic is neither encrypted nor authenticated.
"""

from __future__ import annotations

import base64
import time
from pathlib import Path

import libtorrent as lt
from blake3 import blake3

from tests.bench.swarm.lines import Message, check, hear, say

PORT = 6881
POLL_S = 0.05
SETTINGS: lt.settings_pack = {
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "enable_incoming_utp": False,
    "enable_outgoing_utp": False,
    "upload_rate_limit": 0,
    "download_rate_limit": 0,
    "allow_multiple_connections_per_ip": True,
    "alert_mask": lt.alert.category_t.status_notification | lt.alert.category_t.storage_notification,
}


def session(part: Message) -> lt.session:
    """A session that listens on the host's address only."""
    parameters = lt.session_params()
    parameters.settings = {**SETTINGS, "listen_interfaces": f"{part['address']}:{PORT}"}
    return lt.session(parameters)


def torrent_of(payload: Path, piece_bytes: int) -> bytes:
    """The .torrent of one file."""
    made = lt.create_torrent(lt.list_files(str(payload)), 1 << (piece_bytes - 1).bit_length())
    lt.set_piece_hashes(made, str(payload.parent))
    return bytes(lt.bencode(made.generate()))


def add(running: lt.session, torrent: bytes, directory: Path, *, seeds: bool) -> lt.torrent_handle:
    """The torrent in the session, active."""
    parameters = lt.add_torrent_params()
    parameters.ti = lt.torrent_info(torrent)
    parameters.save_path = str(directory)
    parameters.flags &= ~(lt.torrent_flags.auto_managed | lt.torrent_flags.paused)
    if seeds:
        parameters.flags |= lt.torrent_flags.seed_mode
    return running.add_torrent(parameters)


def seed(part: Message) -> None:
    """Offer the payload."""
    payload = Path(part["payload"])
    torrent = torrent_of(payload, part["piece_bytes"])
    running = session(part)
    add(running, torrent, payload.parent, seeds=True)
    say("ready", torrent=base64.b64encode(torrent).decode(), name=payload.name)
    hear("meet")
    say("met")
    hear("publish")
    hear("check")
    check(blake3(payload.read_bytes()).hexdigest())


def work(part: Message) -> None:
    """Connect to everybody at publication, fetch, flush."""
    directory = Path(part["directory"])
    running = session(part)
    say("ready")
    hosts = hear("meet")["hosts"]
    torrent = base64.b64decode(hosts[0]["torrent"])
    say("met")
    hear("publish")
    handle = add(running, torrent, directory, seeds=False)
    for host in hosts:
        if host["host"] != part["host"]:
            handle.connect_peer((host["address"], PORT))
    while not handle.status().is_seeding:
        running.wait_for_alert(int(POLL_S * 1e3))
        running.pop_alerts()
    flush(running, handle)
    say("done", at=time.monotonic())
    hear("check")
    check(blake3((directory / hosts[0]["name"]).read_bytes()).hexdigest())


def flush(running: lt.session, handle: lt.torrent_handle) -> None:
    """Return when what was received is on disk: it reports 100 % before that."""
    handle.flush_cache()
    while True:
        running.wait_for_alert(int(POLL_S * 1e3))
        if any(isinstance(alert, lt.cache_flushed_alert) for alert in running.pop_alerts()):
            return


def main() -> None:
    """Host 0 seeds."""
    part = hear("part")
    (seed if part["host"] == 0 else work)(part)


if __name__ == "__main__":
    main()

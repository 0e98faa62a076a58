"""What a rented machine runs: the worker, and after it the machine's own end."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

_VALUE = re.compile(r"[A-Za-z0-9_.:/@%+=,\[\]-]{1,1024}")  # needs no quoting anywhere on its way


def start_script(*, give_up_min: float, worker_options: Sequence[str], farewell: str) -> str:
    """Shell text. The worker leaves by itself when it does not hear its coordinator for `give_up_min`; the machine follows it.

    `worker_options`: further options of `echo2-worker join`. Address and invite come in ECHO2_URL and ECHO2_INVITE, never in here.
    """
    options = " ".join(shlex.quote(option) for option in worker_options)
    join = f'echo2-worker join "$ECHO2_URL" --price 0 --give-up-after-min {give_up_min:g}{" " + options if options else ""}'
    if not farewell:
        return join
    return f"{join}; while true; do {farewell}; sleep 60; done"


def environment(*, url: str, invite: str) -> Mapping[str, str]:
    """What the script reads. Raises ValueError for an address that would need quoting."""
    if not _VALUE.fullmatch(url):
        raise ValueError(f"the coordinator's address is {url!r}: give one of letters, digits and .:/-")
    return {"ECHO2_URL": url, "ECHO2_INVITE": invite}

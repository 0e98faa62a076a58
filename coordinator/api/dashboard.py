"""The dashboard: one self-contained page. Its script and style are named by hash in the content policy; nothing else runs."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Page:
    """The document and the Content-Security-Policy that fits it."""

    html: str
    policy: str


@cache
def page() -> Page:
    """The page, assembled once from the files beside this module."""
    here = files("coordinator.api")
    style = (here / "dashboard.css").read_text(encoding="utf-8")
    script = (here / "dashboard.js").read_text(encoding="utf-8")
    html = (here / "dashboard.html").read_text(encoding="utf-8")
    html = html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = (
        f"default-src 'none'; script-src '{_source(script)}'; style-src '{_source(style)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html, policy)


def _source(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

"""The live page: one HTML file with its style and script in it, and headers that allow nothing else."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Page:
    html: str
    headers: dict[str, str]


def load_page() -> Page:
    """The page with its style and script put in, and a policy that allows just these two, by their hashes."""
    folder = resources.files(__name__)
    style, script = (folder.joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    html = folder.joinpath("page.html").read_text("utf-8")
    html = html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {_hash(style)}",
            f"script-src {_hash(script)}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(html, headers)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

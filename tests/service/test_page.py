"""The live page: what it is made of, and what a real browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.service.serving import ALIAS, Running
from tests.service.test_refusals import send

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Links(HTMLParser):
    """Attributes with which a page loads something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [name for name, _ in attrs if name in ("src", "href", "action", "style") or name.startswith("on")]


@pytest.fixture(scope="module")
def page(running: Running) -> tuple[str, dict[str, str]]:
    with urllib.request.urlopen(running.url + "/", timeout=10) as response:
        return response.read().decode(), dict(response.headers)


def test_it_loads_nothing_from_anywhere(page: tuple[str, dict[str, str]]) -> None:
    links = Links()
    links.feed(page[0])
    assert links.found == []
    assert not re.findall(r"https?://", page[0])


def test_its_policy_allows_nothing_but_its_own_style_and_script(page: tuple[str, dict[str, str]]) -> None:
    policy = page[1]["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_its_data_has_what_it_shows(running: Running) -> None:
    send(running, "/v1/completions", {"model": ALIAS, "prompt": "abc", "max_tokens": 20})
    status, data = send(running, "/v1/autopipe/status")
    assert status == 200
    assert data["state"] == "ready"
    assert data["plain_tokens_per_s"] > 0
    assert [stage["name"] for stage in data["stages"]] == ["ngram", "target"]
    assert set(data["stages"][0]) >= {"fill", "acceptance_rate", "busy_share", "up", "window", "role"}
    assert data["plan"]["reason"]
    assert {"running", "waiting"} == set(data["load"])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a page in a headless browser and returns its final DOM."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (Debian: apt install chromium)")
    profile = tmp_path_factory.mktemp("chromium")

    def dump(url: str) -> tuple[str, str]:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--virtual-time-budget=5000"]
        done = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, timeout=90, check=True)
        return done.stdout, done.stderr

    return dump


def test_a_real_browser_shows_the_running_pipeline(browser: Any, running: Running) -> None:
    dom, log = browser(running.url + "/")
    assert 'class="badge ready"' in dom
    assert re.findall(r'<li[^>]*data-stage="(\w+)"', dom) == ["ngram", "target"]
    assert "ngram(4) &gt; target, lockstep" in dom
    assert json.dumps("Refused to")[1:-1] not in log
    assert "Uncaught" not in log

"""Kill -9 of the whole server: what it had accepted under a key is finished by the next one, to the same text."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.serving import ALIAS, Running, serving, tiny_plan, until
from tests.service.test_refusals import send

TEXT = "/v1/completions"
KEYS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
TOKENS = 360


@contextlib.contextmanager
def server(folder: Path, journal: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`autopipe serve`, ready, in a process group of its own; its address and its process."""
    command = [sys.executable, "-m", "autopipe", "serve", "--port", "0", "--quiet", "--served-model-name", ALIAS]
    command += ["--target", str(folder), "--drafter", "ngram", "--window", "4", "--max-active", "2"]
    process = subprocess.Popen(
        [*command, "--journal", str(journal)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stderr is not None
        found = next(filter(None, (re.search(r"http://[\d.:]+", line) for line in process.stderr)))
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        until(lambda: get(found[0], "/health")[0] == 200, 120)
        yield found[0], process
    finally:
        kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill -9 of the server and its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


def get(url: str, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url + path, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except OSError:
        return 0, None


def body(key: str, tokens: int = TOKENS) -> dict[str, Any]:
    """A request with a seed of its own."""
    return {
        "model": ALIAS, "prompt": "abc", "max_tokens": tokens, "seed": KEYS.index(key), "logit_bias": {"257": -100},
    }  # fmt: skip


def post(url: str, key: str) -> Any:
    """The answer's text; None: the server was killed."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    request = urllib.request.Request(url + TEXT, json.dumps(body(key)).encode(), headers)
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


def report(url: str, key: str) -> dict[str, Any]:
    """What the server knows of a request: status, text, completion_tokens."""
    status, found = get(url, f"/v1/autopipe/requests/{key}")
    return found["choices"][0] if status == 200 else {"status": "unknown", "text": "", "completion_tokens": 0}


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no process groups on this system")
def test_a_killed_servers_requests_are_finished_by_the_next_one(
    tiny_folder: Path, tmp_path: Path, running: Running
) -> None:
    expected = {key: send(running, TEXT, body(key))[1]["choices"][0]["text"] for key in KEYS}
    journal = tmp_path / "requests.sqlite"
    with server(tiny_folder, journal) as (url, process):
        clients = [threading.Thread(target=post, args=(url, key)) for key in KEYS]
        for client in clients:
            client.start()
        until(lambda: all(report(url, key)["status"] != "unknown" for key in KEYS))
        until(lambda: any(report(url, key)["completion_tokens"] for key in KEYS))
        before = {key: report(url, key) for key in KEYS}
        kill(process)
        for client in clients:
            client.join(20)
    assert "running" in {found["status"] for found in before.values()}, "they were over before the kill"
    with serving(tiny_plan(tiny_folder), journal_path=str(journal)) as restarted:
        url = restarted.url
        for key in KEYS:
            found = report(url, key)
            assert found["completion_tokens"] >= before[key]["completion_tokens"]
            assert found["text"].startswith(before[key]["text"].rstrip("\ufffd"))
        until(lambda: all(report(url, key)["status"] == "finished" for key in KEYS), 60)
        assert {key: report(url, key)["text"] for key in KEYS} == expected
        assert {key: post(url, key) for key in KEYS} == expected

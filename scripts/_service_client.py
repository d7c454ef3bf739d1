"""A server in a process of its own, and an asyncio client that sees every byte: what the checks of the service use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil


@dataclass
class ServerProcess:
    """`autopipe serve`, running."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tree(self) -> list[psutil.Process]:
        """The server's process, then its workers."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []


@contextlib.contextmanager
def server(*options: str, timeout_s: float = 180.0) -> Iterator[ServerProcess]:
    """Start `autopipe serve` with `options` on a free port; wait until it is ready; end it afterwards."""
    command = [sys.executable, "-m", "autopipe", "serve", "--port", "0", "--quiet", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    if process.stderr is None:
        raise RuntimeError("no stderr")
    lines: list[str] = []
    try:
        port = None
        for line in process.stderr:
            lines.append(line)
            found = re.search(r"http://[\d.]+:(\d+)", line)
            if found:
                port = int(found[1])
                break
        if port is None:
            raise SystemExit("the server did not start:\n" + "".join(lines))
        drain = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
        drain.start()
        deadline_s = time.monotonic() + timeout_s
        while asyncio.run(get(port, "/health"))[0] != 200:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit("the server did not get ready:\n" + "".join(lines))
            time.sleep(0.1)
        yield ServerProcess(process, port, lines)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@dataclass
class Answer:
    """What a client got.

    Attributes:
        status: of HTTP; 0: no answer.
        error: the error's code, of the answer or in mid-stream; `hung`: nothing came in time.
        tokens: as the usage says.
    """

    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    tokens: int = 0
    ttft_s: float | None = None
    seconds: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


async def get(port: int, path: str, *, method: str = "GET", body: Any = None) -> tuple[int, bytes]:
    """Status and body of an answer; (0, b"") if nobody listens."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return 0, b""
    try:
        writer.write(_request(port, method, path, body))
        data = await reader.read()
    finally:
        writer.close()
    head, _, rest = data.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, rest


async def ask(
    port: int, body: dict[str, Any], *, path: str = "/v1/chat/completions", leave_after_s: float | None = None,
    patience_s: float = 120.0,
) -> Answer:  # fmt: skip
    """Send a request and read its stream to the end, or for `leave_after_s` seconds."""
    answer, started_s = Answer(), time.monotonic()
    body = {"stream": True, "stream_options": {"include_usage": True}, **body}
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return answer
    try:
        writer.write(_request(port, "POST", path, body))
        await asyncio.wait_for(_read_stream(reader, answer, started_s), leave_after_s or patience_s)
    except TimeoutError:
        answer.error = None if leave_after_s else "hung"
    except (OSError, ValueError, asyncio.IncompleteReadError):
        answer.error = answer.error or "connection_lost"
    finally:
        writer.close()
    answer.seconds = time.monotonic() - started_s
    return answer


async def _read_stream(reader: asyncio.StreamReader, answer: Answer, started_s: float) -> None:
    answer.status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        continue
    if answer.status != 200:
        data = await reader.read()
        answer.error = json.loads(data)["error"]["code"]
        return
    last_s = None
    while line := await reader.readline():
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk, now = json.loads(line[6:]), time.monotonic()
        if "error" in chunk:
            answer.error = chunk["error"]["code"]
            continue
        if chunk["usage"]:
            answer.tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            answer.text += text
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason
            if text:
                if last_s is None:
                    answer.ttft_s = now - started_s
                else:
                    answer.gaps_s.append(now - last_s)
                last_s = now


def _request(port: int, method: str, path: str, body: Any) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def clients(
    port: int, num_clients: int, bodies: Sequence[tuple[str, dict[str, Any]]]
) -> tuple[list[Answer], float]:
    """Have clients work through `bodies` (path and request), each taking the next; answers in order, and seconds."""
    answers: list[Answer | None] = [None] * len(bodies)
    numbers = iter(range(len(bodies)))

    async def client() -> None:
        for number in numbers:
            path, body = bodies[number]
            answers[number] = await ask(port, body, path=path)

    started_s = time.monotonic()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    return [answer for answer in answers if answer is not None], time.monotonic() - started_s

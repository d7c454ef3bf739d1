"""Control channel and doorbells between the engine and its workers.

A channel carries small JSON messages over a socket pair (no pickle: a message cannot run code). A doorbell is
a file descriptor that any neighbour may ring and its owner sleeps on, so that waiting costs no CPU.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections import deque
from typing import Any

Message = dict[str, Any]

_LENGTH = struct.Struct("<I")


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end of a control channel. `receive` never blocks.

    Args:
        patient: `send` waits for a slow reader; otherwise it keeps what the reader does not take, for `flush`.
    """

    def __init__(self, end: socket.socket, *, patient: bool = True) -> None:
        self._socket = end
        self._patient = patient
        self._outgoing = bytearray()
        self._buffer = bytearray()
        self._ready: deque[Message] = deque()

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Our end, which never blocks, and the end for the other process."""
        ours, theirs = socket.socketpair()
        return Channel(ours, patient=False), Channel(theirs)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Channel:
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Raises ChannelClosedError when the other end is gone."""
        payload = json.dumps(message, separators=(",", ":")).encode()
        try:
            if self._patient:
                self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise ChannelClosedError(str(error)) from None
        if not self._patient:
            self._outgoing += _LENGTH.pack(len(payload)) + payload
            if self.flush() is None:
                raise ChannelClosedError("the other end closed the channel")

    def flush(self) -> bool | None:
        """Send what is kept; True: something is left, None: the other end is gone."""
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                self._outgoing.clear()
                return None
            del self._outgoing[:sent]
        return False

    def receive(self) -> Message | None:
        """The next message, or None when there is none now.

        Raises:
            ChannelClosedError: the other end is gone and everything it sent has been received.
        """
        while not self._ready:
            try:
                data = self._socket.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError as error:
                raise ChannelClosedError(str(error)) from None
            if not data:
                raise ChannelClosedError("the other end closed the channel")
            self._buffer += data
            self._split()
        return self._ready.popleft()

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until `receive` has something to say, or the time is over."""
        if not self._ready:
            poller = select.poll()
            poller.register(self._socket.fileno(), select.POLLIN)
            poller.poll(None if timeout_s is None else timeout_s * 1e3)

    def _split(self) -> None:
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if len(self._buffer) < _LENGTH.size + size:
                return
            payload = bytes(self._buffer[_LENGTH.size : _LENGTH.size + size])
            del self._buffer[: _LENGTH.size + size]
            self._ready.append(json.loads(payload))

    def close(self) -> None:
        self._socket.close()


class Doorbell:
    """Wakes one sleeper. Rings before the sleeper sleeps are not lost; many rings are one."""

    def __init__(self, read_descriptor: int, write_descriptor: int) -> None:
        self.read_descriptor = read_descriptor
        self.write_descriptor = write_descriptor

    @classmethod
    def create(cls) -> Doorbell:
        if hasattr(os, "eventfd"):
            descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return cls(descriptor, descriptor)
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        return cls(reader, writer)

    def ring(self) -> None:
        try:
            os.write(self.write_descriptor, b"\x01\0\0\0\0\0\0\0")
        except BlockingIOError:
            return  # already ringing as loudly as it can

    def silence(self) -> None:
        """Forget the rings so far."""
        try:
            while len(os.read(self.read_descriptor, 4096)) == 4096:
                continue
        except BlockingIOError:
            return

    def descriptors(self) -> set[int]:
        return {self.read_descriptor, self.write_descriptor}

    def close(self) -> None:
        for descriptor in self.descriptors():
            os.close(descriptor)

"""A thin layer over `pynvml` (package nvidia-ml-py): late import, sorted errors, text in any encoding."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from autopipe.core.telemetry.counters import Unreadable, Unsupported
from autopipe.core.telemetry.source import TelemetryUnavailableError

NOT_AVAILABLE_32 = 0xFFFFFFFF
NOT_AVAILABLE_64 = 0xFFFFFFFFFFFFFFFF

# NVML return codes (nvml.h, nvmlReturn_t); as numbers, so that no version of pynvml lacks one.
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND = 2, 3, 4, 6
_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND, _FUNCTION_NOT_FOUND = 9, 12, 13
_VERSION_MISMATCH = 18
_NEVER = {_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND, _FUNCTION_NOT_FOUND, 25, 26}
# 1 uninitialised, 15 lost, 16 reset required, 28 GPU not found
_LOST = {1, _DRIVER_NOT_LOADED, 15, 16, _VERSION_MISMATCH, 28}

_START_PROBLEMS = {
    _LIBRARY_NOT_FOUND: "no NVIDIA driver library (libnvidia-ml.so.1) on this machine",
    _DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded (try `nvidia-smi`)",
    _VERSION_MISMATCH: "NVIDIA driver and library have different versions, as after a driver update: reboot",
    _NO_PERMISSION: "no permission to use the NVIDIA driver: this user needs access to /dev/nvidia*",
}


class DeviceLost(Exception):
    """The device, or the whole driver session, does not answer any more."""


class Nvml:
    """One NVML session.

    Raises:
        TelemetryUnavailableError: nvidia-ml-py is not installed.
    """

    def __init__(self) -> None:
        try:
            self.bindings: Any = importlib.import_module("pynvml")
        except ImportError:
            raise TelemetryUnavailableError(
                "GPU telemetry is off: nvidia-ml-py is not installed (pip install nvidia-ml-py)"
            ) from None
        self._started = False

    def start(self) -> None:
        """Open the session.

        Raises:
            TelemetryUnavailableError: the reason in one line.
        """
        try:
            self.bindings.nvmlInit()
        except self.bindings.NVMLError as error:
            code: int = getattr(error, "value", 999)
            problem = _START_PROBLEMS.get(code) or f"NVML does not start: {self.describe(error)}"
            raise TelemetryUnavailableError(
                f"GPU telemetry is off: {problem}", expected=code == _LIBRARY_NOT_FOUND
            ) from None
        self._started = True

    def stop(self) -> None:
        """Close the session; never raises for a driver that is gone."""
        if not self._started:
            return
        self._started = False
        with contextlib.suppress(self.bindings.NVMLError):  # nothing left to close is what was wanted
            self.bindings.nvmlShutdown()

    def call(self, function: str, *arguments: Any, **keywords: Any) -> Any:
        """Call `pynvml.FUNCTION`.

        Raises:
            Unsupported: this device, driver or user will never get an answer.
            Unreadable: no answer this time.
            DeviceLost: the device is gone.
        """
        found = getattr(self.bindings, function, None)
        if found is None:
            raise Unsupported(f"{function} is newer than the installed nvidia-ml-py")
        return self._sorted(found, *arguments, **keywords)

    def text(self, function: str, *arguments: Any) -> str:
        """Like `call` for a function that gives text; what is not UTF-8 is replaced."""
        found = getattr(self.bindings, function)
        # pynvml decodes strictly, so one odd byte in a name would raise: go under its decorator.
        answer = self._sorted(getattr(found, "__wrapped__", found), *arguments)
        return answer.decode("utf-8", errors="replace") if isinstance(answer, bytes) else str(answer)

    def check(self, code: int) -> None:
        """Raise what `call` would for this return code."""
        if code != 0:
            self._raise(code, self.describe(self.bindings.NVMLError(code)))

    def describe(self, error: Exception) -> str:
        """The error in words (NVML's own, when they can be read)."""
        try:
            return str(error)
        except (UnicodeDecodeError, self.bindings.NVMLError):
            return f"NVML error {getattr(error, 'value', '?')}"

    def _sorted(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except self.bindings.NVMLError as error:
            self._raise(getattr(error, "value", 999), self.describe(error))

    @staticmethod
    def _raise(code: int, words: str) -> None:
        if code in _NEVER:
            raise Unsupported(words)
        if code in _LOST:
            raise DeviceLost(words)
        raise Unreadable(words)

"""The interface of telemetry sources. `conformance.TelemetrySourceSuite` tests an implementation of it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from autopipe.core.errors import AutoPipeError
from autopipe.core.telemetry.snapshot import DeviceSnapshot


class TelemetryUnavailableError(AutoPipeError):
    """A source cannot be had on this machine (no library, no driver, no permission); the message is one line.

    Attributes:
        expected: nothing is wrong with the machine (it has no such device), so nobody need be warned.
    """

    def __init__(self, message: str, expected: bool = False) -> None:
        super().__init__(message)
        self.expected = expected


class TelemetrySource(ABC):
    """Reads some of a machine's devices. Life: `open`, any number of `read`, `close`, perhaps `open` again.

    Threads: the methods of one source are never called at the same time, but not always by the same thread.
    A `read` may take as long as the hardware does; it is never on the path of generation.

    Contract of `read`:
        - one snapshot for each device, in a stable order, and a device keeps its `DeviceInfo`;
        - what is unknown is None, never 0; differenced figures (utilisation of a CPU, link throughput) are
          None in the first reading;
        - what a device does not support is asked once, and not again;
        - a device that fails yields a snapshot with `error` set; it hides no other and is tried again;
        - `time_s` is `time.monotonic()` and never falls;
        - `energy` never falls within an epoch.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for messages (`nvml`, `cpu`)."""

    @abstractmethod
    def open(self) -> None:
        """Get ready.

        Raises:
            TelemetryUnavailableError: the source cannot work here. Nothing is left open.
        """

    @abstractmethod
    def read(self) -> tuple[DeviceSnapshot, ...]:
        """Read every device once.

        Raises:
            TelemetryUnavailableError: not open.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back everything. Does nothing when not open."""

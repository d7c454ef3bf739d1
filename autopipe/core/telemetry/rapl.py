"""Energy of the CPU from RAPL, through Linux's powercap files.

Documentation/power/powercap/powercap.rst: `energy_uj` counts microjoules and starts at 0 again after
`max_energy_range_uj`. Counted are the packages and, beside them, the memory (`dram`); `core` and `uncore` are
parts of a package, `psys` and the `-mmio` zones would count it twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autopipe.core.telemetry.counters import CounterTotal, Unreadable, Unsupported
from autopipe.core.telemetry.snapshot import EnergyCounter

POWERCAP = Path("/sys/class/powercap")


class Rapl:
    """All packages and memories together.

    Args:
        root: the powercap folder.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._root = root
        self._zones: list[tuple[Callable[[], int], int, CounterTotal]] | None = None

    def read(self) -> EnergyCounter:
        """The total so far.

        Raises:
            Unsupported: there is no RAPL, or it is not readable (one zone unreadable spoils the sum).
        """
        if self._zones is None:
            self._zones = self._find()
        parts = [total.update(value(), modulus) for value, modulus, total in self._zones]
        return EnergyCounter(sum(part.total_j for part in parts), sum(part.epoch for part in parts))

    def _find(self) -> list[tuple[Callable[[], int], int, CounterTotal]]:
        zones = []
        for folder in sorted(self._root.glob("intel-rapl:*")):
            try:
                name = (folder / "name").read_text().strip()
                if not (name.startswith("package") or name == "dram"):
                    continue
                modulus = int((folder / "max_energy_range_uj").read_text()) + 1
            except (OSError, ValueError) as error:
                raise Unsupported(f"RAPL: {error}") from None
            value = _reader(folder / "energy_uj")
            value()  # not readable: say so before anything is counted
            zones.append((value, modulus, CounterTotal(1e-6)))
        if not zones:
            raise Unsupported("this machine has no RAPL counters")
        return zones


def _reader(path: Path) -> Callable[[], int]:
    def read() -> int:
        try:
            return int(path.read_text())
        except PermissionError:
            raise Unsupported(
                f"CPU energy is not measured: no permission to read {path} (as root: chmod o+r {path})"
            ) from None
        except (OSError, ValueError) as error:
            raise Unreadable(f"RAPL: {error}") from None

    return read

"""docs/telemetry.md lists what there is."""

import re
from pathlib import Path

from autopipe.core.telemetry import DeviceInfo, DeviceKind, DeviceUse, EnergyUse

LISTED = set(re.findall(r"`(\w+)`", (Path(__file__).parents[3] / "docs/telemetry.md").read_text(encoding="utf-8")))


def test_page_lists_every_figure_of_a_device():
    assert set(DeviceUse(DeviceInfo("cpu", DeviceKind.CPU, "CPU")).to_dict()) <= LISTED


def test_page_lists_every_figure_of_energy():
    assert set(EnergyUse(1.0, 1).to_dict()) <= LISTED

"""Pictures of an environment: the pipeline in words, and a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.envs.interval import DeviceFigures

_WIDTH_PX, _HEIGHT_PX, _DPI = 960, 540, 100
_BAR = 20


@dataclass(frozen=True, slots=True)
class Frame:
    """One control step, for rendering. `acceptance` by drafter name; None: not known."""

    step: int
    plan: str
    kind: str
    relative_goodput: float | None
    ms_per_token: float | None
    acceptance: dict[str, float]
    position: int
    max_new_tokens: int
    queue: int
    device: DeviceFigures


def render_ansi(frames: Sequence[Frame]) -> str:
    """The newest frame as a few lines of text."""
    now = frames[-1]
    lines = [
        f"step {now.step}  {now.kind}  token {now.position}/{now.max_new_tokens}  queue {now.queue}",
        f"plan       {now.plan}",
        f"goodput    {_goodput(now)}",
    ]
    lines += [f"acceptance {name:<12} {_bar(rate)} {rate:4.0%}" for name, rate in now.acceptance.items()]
    device = now.device
    temperature = None if device.temperature_c is None else device.temperature_c / 100
    shown = {"busy": device.utilisation, "memory": device.memory, "power": device.power}
    figures = [f"{name} {'?' if share is None else f'{share:.0%}'}" for name, share in shown.items()]
    figures.append(f"temperature {'?' if temperature is None else f'{100 * temperature:.0f} C'}")
    lines.append("device     " + ", ".join(figures) + (", throttled" if device.throttled else ""))
    return "\n".join(lines) + "\n"


def render_rgb(
    frames: Sequence[Frame], events: Sequence[NDArray[np.float64]], names: Sequence[str], target_slot: int
) -> NDArray[np.uint8]:
    """A picture, uint8 [540, 960, 3]: who computed when in the last interval, and goodput by control step.

    Args:
        events: forwards, float64 [n, 6] each: slot, start_s, end_s, rows, drafts, emitted.
        names: of the drafters by slot, the target's last.
        target_slot: the slot number of the target in `events`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_PX / _DPI, _HEIGHT_PX / _DPI), dpi=_DPI)
    canvas = FigureCanvasAgg(figure)
    timeline, goodput = figure.subplots(2, 1)
    lanes = np.concatenate(list(events)) if events else np.zeros((0, 6))
    origin_s = float(lanes[:, 1].min()) if len(lanes) else 0.0
    for lane, name in enumerate(names):
        slot = target_slot if lane == len(names) - 1 else lane
        mine = lanes[lanes[:, 0] == slot]
        spans = [(1e3 * (start_s - origin_s), 1e3 * (end_s - start_s)) for _, start_s, end_s, *_ in mine]
        wasted = mine[:, 4] + 1 - mine[:, 5]  # drafts the stage checked in vain
        colours = ["tab:blue" if share == 0 else "tab:orange" for share in wasted]
        timeline.broken_barh(spans, (lane - 0.4, 0.8), facecolors=colours, edgecolors="white", linewidth=0.3)
        timeline.text(0.0, lane + 0.42, name, fontsize=7, va="bottom")
    timeline.set_yticks(range(len(names)), names)
    timeline.set_ylim(-0.6, len(names) - 0.2)
    timeline.set_xlabel("ms in the last interval (orange: some drafts were rejected)")
    timeline.set_title(f"step {frames[-1].step}, {frames[-1].kind}: {frames[-1].plan}", fontsize=9)
    known = [(frame.step, frame.relative_goodput) for frame in frames if frame.relative_goodput is not None]
    goodput.plot([step for step, _ in known], [value for _, value in known], drawstyle="steps-post")
    goodput.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    goodput.set_xlabel("control step")
    goodput.set_ylabel("goodput / plain")
    figure.tight_layout()
    canvas.draw()
    picture: NDArray[np.uint8] = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    return picture


def _goodput(frame: Frame) -> str:
    if frame.relative_goodput is None or frame.ms_per_token is None:
        return "not measured"
    return f"{frame.relative_goodput:.2f} x plain decoding, {frame.ms_per_token:.2f} ms per token"


def _bar(share: float) -> str:
    filled = round(_BAR * min(max(share, 0.0), 1.0))
    return "#" * filled + "." * (_BAR - filled)

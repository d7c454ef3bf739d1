"""What both environments share: spaces, the step, observation, mask, reward and rendering."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from autopipe.core.errors import ConfigError
from autopipe.core.plan import Plan
from autopipe.envs.config import EnvConfig
from autopipe.envs.interval import Interval
from autopipe.envs.menu import OFF, Action, ActionCodec, Mask, PlanMenu
from autopipe.envs.observation import Observation, Observer, observation_sizes
from autopipe.envs.render import Frame, render_ansi, render_rgb
from autopipe.envs.reward import Decision, reward_terms

_FRAMES_KEPT = 120


def observation_space(config: EnvConfig) -> spaces.Dict:
    """The observation space of a configuration: a `Dict` of `Box`es in [0, 1]."""
    sizes = observation_sizes(config)
    return spaces.Dict({name: spaces.Box(0.0, 1.0, (size,), np.float32) for name, size in sizes.items()})


def action_space(codec: ActionCodec) -> spaces.MultiDiscrete:
    """The action space of a configuration."""
    return spaces.MultiDiscrete(codec.sizes)


def interval_info(interval: Interval) -> dict[str, Any]:
    """What `info` says of an interval, whoever measured it; nothing in it is None or NaN."""
    figures = interval.slots
    info: dict[str, Any] = {
        "num_tokens": interval.num_tokens,
        "decode_tokens": interval.decode_tokens,
        "decode_s": interval.decode_s,
        "plain_s": interval.plain_s,
        "queue": interval.queue,
        "kind": interval.kind.value,
        "agreement": interval.agreement,
        "proposed": figures.proposed,
        "accepted": figures.accepted,
        "room": figures.room,
        "rollbacks": figures.rollbacks,
        "step_s": figures.step_s,
    }
    if interval.energy_j is not None:
        info["energy_j"] = interval.energy_j
    if interval.error is not None:
        info["error"] = interval.error
    return info


class PipelineEnv(gymnasium.Env[Observation, NDArray[np.int64]]):
    """Base of `PipelineSimEnv` and `PipelineLiveEnv`; see there for the sections of the documentation.

    A subclass begins an episode, puts actions in force, and reports intervals.

    Args:
        render_mode: None, "ansi" (the pipeline, in words) or "rgb_array" (a timeline, uint8 [540, 960, 3]).

    Raises:
        ConfigError: an unknown `render_mode`.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 8}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(self, config: EnvConfig, render_mode: str | None = None) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError("render_mode", render_mode, f"None, {', '.join(self.metadata['render_modes'])}")
        self.config = config
        self.render_mode = render_mode
        self.observation_space = cast("spaces.Space[Observation]", observation_space(config))
        self._interval = Interval()
        self._num_steps = 0
        self._codec: ActionCodec
        self._observer: Observer
        self._frames: deque[Frame] = deque(maxlen=_FRAMES_KEPT)
        self._ended = True

    # -- the subclass' part ---------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, seed: int, options: dict[str, Any]) -> Interval:
        """Begin an episode; set `_codec` and `_observer`; return the state of things, without tokens."""

    @abstractmethod
    def _put_in_force(self, action: Action) -> bool:
        """Put a canonical, allowed action in force; False when that turns out to be impossible."""

    @abstractmethod
    def _next_interval(self) -> Interval:
        """Wait for the next control interval."""

    @abstractmethod
    def _action_in_force(self) -> Action:
        """The canonical action that runs now; behind the last decision while drafters load."""

    @abstractmethod
    def _memory(self) -> tuple[int | None, int]:
        """Memory of the device, and what somebody else takes of it, in bytes."""

    @abstractmethod
    def _dead(self) -> int:
        """Bit mask of drafters that are gone."""

    @abstractmethod
    def _lanes(self) -> list[NDArray[np.float64]]:
        """Forwards of the last interval for the timeline; see `SimWorld.events`."""

    # -- Gymnasium ------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode; all randomness comes from this environment's own generator."""
        super().reset(seed=seed)
        self._interval = self._begin(int(self.np_random.integers(2**62)), options or {})
        self._num_steps, self._ended = 0, False
        self._frames.clear()
        self._decided = self._codec.off()
        return self._observe(), self._info({}, Decision())

    def step(self, action: NDArray[np.int64] | Sequence[int]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Put an action in force and live through one control interval.

        Raises:
            ConfigError: not an action of this space.
            gymnasium.error.ResetNeeded: before `reset`, or after the end of an episode.
        """
        if self._ended:
            raise gymnasium.error.ResetNeeded("call reset() first: no episode is under way")
        decision = self._decide(action)
        self._interval = interval = self._next_interval()
        self._num_steps += 1
        self._observer.update(interval)
        terms = reward_terms(interval, decision, self.config.reward, self.config.targets)
        terminated = interval.done
        truncated = not terminated and (interval.error is not None or self._num_steps >= self.config.max_steps)
        self._ended = terminated or truncated
        if self.render_mode is not None:
            self._frames.append(self._frame())
        return self._observe(), float(sum(terms.values())), terminated, truncated, self._info(terms, decision)

    def render(self) -> Any:
        """The pipeline as text (`ansi`), or a timeline picture uint8 [540, 960, 3] (`rgb_array`)."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() needs render_mode 'ansi' or 'rgb_array' when the environment is made")
            return None
        frames = list(self._frames) or [self._frame()]
        if self.render_mode == "ansi":
            return render_ansi(frames)
        return render_rgb(frames, self._lanes(), [*self._codec.slot_names(), "target"], self._codec.num_slots)

    # -- for policies ---------------------------------------------------------------------------------------

    def action_masks(self) -> Mask:
        """What may be chosen now, bool [sum(nvec)], in the form that sb3-contrib's MaskablePPO expects.

        Masked are chains that are not on the menu, do not fit the device's memory or contain a drafter that is gone,
        and adapters that are not on the menu. `off` is never masked.
        """
        total_bytes, others_bytes = self._memory()
        return self._codec.masks(total_bytes, others_bytes, self.config.memory_share, self._dead())

    @property
    def menu(self) -> PlanMenu:
        """The plans on offer."""
        return self._codec.menu

    @property
    def codec(self) -> ActionCodec:
        """Turns actions into plans and back."""
        return self._codec

    def plan(self, action: Sequence[int] | NDArray[np.int64]) -> Plan:
        """The plan that an action stands for."""
        return self._codec.plan(action)

    # -- steps of a step ------------------------------------------------------------------------------------

    def _decide(self, action: NDArray[np.int64] | Sequence[int]) -> Decision:
        """Put the action in force, unless the mask forbids it."""
        wanted, before = self._codec.canonical(action), self._decided
        total_bytes, others_bytes = self._memory()
        chain, adapter = int(wanted[0]), int(wanted[-1])
        known_adapter = int(np.asarray(action).reshape(-1)[-1]) <= len(self._codec.menu.adapters)
        share, dead = self.config.memory_share, self._dead()
        if not known_adapter or not self._codec.allowed(chain, total_bytes, others_bytes, share, dead):
            return Decision(rejected=True)
        if np.array_equal(wanted, before):
            return Decision()
        if not self._put_in_force(wanted):
            return Decision(rejected=True)
        self._decided = wanted
        switched = chain != int(before[0]) or (chain != OFF and adapter != int(before[-1]))
        return Decision(switched=switched, retuned=not switched)

    def _observe(self) -> Observation:
        return self._observer.observe(self._interval, self._action_in_force())

    def _info(self, terms: dict[str, float], decision: Decision) -> dict[str, Any]:
        """What a policy may learn from beside the observation; nothing in it is None or NaN."""
        interval = self._interval
        info: dict[str, Any] = {
            **interval_info(interval),
            "reward_terms": terms,
            "switched": decision.switched,
            "retuned": decision.retuned,
            "rejected": decision.rejected,
            "action_in_force": self._action_in_force().copy(),
            "action_mask": self.action_masks(),
        }
        return info

    def _frame(self) -> Frame:
        interval, action = self._interval, self._action_in_force()
        rates = self._observer.acceptance[0]
        names = self._codec.slot_names()
        return Frame(
            step=self._num_steps,
            plan=self._codec.describe(action),
            kind=interval.kind.value,
            relative_goodput=interval.relative_goodput,
            ms_per_token=interval.ms_per_token,
            acceptance={name: float(rates[slot]) for slot, name in enumerate(names) if not np.isnan(rates[slot])},
            position=interval.position,
            max_new_tokens=interval.max_new_tokens,
            queue=interval.queue,
            device=interval.device,
        )

"""Trains the RL policy: imitation of a teacher that knows everything, then PPO in the simulator.

From scratch PPO has to find out in millions of steps what closed formulas know; so it starts from a network that
imitates them (DAgger, arXiv 1011.0686: the network acts, the teacher says what it would have done) and then improves on
it by what the simulator really yields. `imitation_steps=0` leaves the first part out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from autopipe.core.config import UserModel
from autopipe.core.errors import ConfigError
from autopipe.envs.config import EnvConfig
from autopipe.envs.randomise import Randomisation
from autopipe.envs.scenario import load_scenario, scenario_names
from autopipe.policies.features import feature_size
from autopipe.policies.imitation import Lessons, imitate
from autopipe.policies.rl_checkpoint import load_checkpoint, save_checkpoint
from autopipe.policies.rl_env import TrainingEnv
from autopipe.policies.rl_format import PolicyHeader, save_policy

if TYPE_CHECKING:
    from stable_baselines3.common.callbacks import BaseCallback

_log = logging.getLogger(__name__)

ALGORITHMS = ("maskable-ppo", "ppo", "recurrent-ppo")
_EPISODE_STEPS = 512
_EVAL_SEED = 900_000
_EVAL_EPISODES = 4


class TrainConfig(UserModel):
    """Settings of a training run; a run that is resumed has the same but for `timesteps`.

    Attributes:
        timesteps: control intervals that PPO lives through, in all.
        envs: environments side by side.
        imitation_steps: control intervals of imitation before that.
        scenarios: shipped names or files; every episode draws one and randomises it.
        random_share: share of episodes on machines drawn at random instead.
        eval_every: timesteps between two evaluations and checkpoints.
        hidden: sizes of the hidden layers.
    """

    algorithm: str = "maskable-ppo"
    timesteps: int = Field(default=400_000, ge=0)
    seed: int = Field(default=0, ge=0)
    envs: int = Field(default=8, ge=1, le=256)
    imitation_steps: int = Field(default=60_000, ge=0)
    scenarios: tuple[str, ...] = Field(default_factory=lambda: tuple(scenario_names()), min_length=1)
    randomisation: Randomisation = Field(default_factory=Randomisation.for_training)
    random_share: float = Field(default=0.5, ge=0, le=1)
    learning_rate: float = Field(default=1.5e-4, gt=0)
    num_steps: int = Field(default=256, ge=8)
    batch_size: int = Field(default=512, ge=8)
    epochs: int = Field(default=5, ge=1)
    gamma: float = Field(default=0.9, ge=0, lt=1)
    entropy: float = Field(default=0.001, ge=0)
    clip: float = Field(default=0.15, gt=0)
    hidden: tuple[int, ...] = Field(default=(192, 128), min_length=1)
    eval_every: int = Field(default=25_000, ge=1)
    env: EnvConfig = EnvConfig(max_steps=_EPISODE_STEPS)

    def profile_hash(self) -> str:
        """Of everything that the policy was trained on."""
        scenarios = [load_scenario(name).model_dump(mode="json") for name in self.scenarios]
        text = json.dumps([scenarios, self.randomisation.model_dump(mode="json")], sort_keys=True)
        return sha256(text.encode()).hexdigest()[:16]


Say = Callable[[str], None]


def train(config: TrainConfig, folder: Path, *, resume: bool = False, say: Say = lambda text: None) -> dict[str, Any]:
    """Train into a folder: checkpoint, TensorBoard logs (`tb`), progress (`progress*.csv`), and the policy itself.

    Args:
        resume: go on from the folder's checkpoint, up to `config.timesteps`.
        say: told how it goes, line by line.

    Returns:
        {timesteps, mean_reward, relative_goodput} of the last evaluation.

    Raises:
        ConfigError: an unknown algorithm, a folder that is in use, or nothing to resume.
    """
    if config.algorithm not in ALGORITHMS:
        raise ConfigError("--algorithm", config.algorithm, ", ".join(ALGORITHMS))
    if not resume and (folder / "checkpoint.json").exists():
        raise ConfigError("--out", str(folder), "a new folder, or --resume to go on with the run in it")
    import torch

    torch.manual_seed(config.seed)
    model = make_model(config, Lessons.none(config.env))
    done = 0
    if resume:
        done = load_checkpoint(folder, model, config)
        say(f"resumed at {done} timesteps")
    elif config.imitation_steps and config.algorithm != "recurrent-ppo":
        envs = [training_env(config) for _ in range(config.envs)]
        lessons = imitate(model, envs, config.imitation_steps, config.seed, say, folder)
        say(f"imitated {len(lessons)} decisions; agreement with the teacher {lessons.agreement:.1%}")
    folder.mkdir(parents=True, exist_ok=True)
    model.set_logger(_logger(folder))
    callback = _evaluation(config, folder, say)
    if done == 0:
        evaluate_model(model, config, say, 0)
        save_checkpoint(folder, model, config, 0)
    if config.timesteps > done:
        model.num_timesteps = done
        model.learn(config.timesteps - done, callback=callback, reset_num_timesteps=False, tb_log_name="ppo")
    result = evaluate_model(model, config, say, model.num_timesteps)
    save_checkpoint(folder, model, config, model.num_timesteps)
    if config.algorithm != "recurrent-ppo":
        export(model, config, folder / "policy", model.num_timesteps)
    return result


def make_model(config: TrainConfig, lessons: Lessons) -> Any:
    """The algorithm's model with its network, as stable-baselines3 has it."""
    from sb3_contrib import MaskablePPO, RecurrentPPO
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

    from autopipe.policies.rl_network import FixedNormaliser

    vector = VecMonitor(DummyVecEnv([lambda: training_env(config)] * config.envs))
    vector.seed(config.seed)
    kinds: dict[str, tuple[Any, str]] = {
        "maskable-ppo": (MaskablePPO, "MlpPolicy"),
        "ppo": (PPO, "MlpPolicy"),
        "recurrent-ppo": (RecurrentPPO, "MlpLstmPolicy"),
    }
    algorithm, policy = kinds[config.algorithm]
    hidden = list(config.hidden)
    return algorithm(
        policy,
        vector,
        learning_rate=config.learning_rate,
        n_steps=config.num_steps,
        batch_size=config.batch_size,
        n_epochs=config.epochs,
        gamma=config.gamma,
        gae_lambda=0.9,
        ent_coef=config.entropy,
        clip_range=config.clip,
        seed=config.seed,
        device="cpu",
        policy_kwargs={
            "net_arch": {"pi": hidden, "vf": hidden},
            "features_extractor_class": FixedNormaliser,
            "features_extractor_kwargs": {"mean": lessons.mean, "std": lessons.std},
        },
    )


def export(model: Any, config: TrainConfig, folder: Path, timesteps: int) -> None:
    """Write the network alone, as `RlPolicy` reads it.

    Raises:
        ConfigError: a recurrent model, which the format does not hold.
    """
    if config.algorithm == "recurrent-ppo":
        raise ConfigError("--algorithm", config.algorithm, "maskable-ppo or ppo: a recurrent network is not exported")
    import torch

    policy = model.policy
    linear = [layer for layer in policy.mlp_extractor.policy_net if isinstance(layer, torch.nn.Linear)]
    linear.append(policy.action_net)
    tensors: dict[str, torch.Tensor] = {
        "mean": policy.features_extractor.mean,
        "std": policy.features_extractor.std,
    }
    for index, layer in enumerate(linear):
        tensors[f"layers.{index}.weight"], tensors[f"layers.{index}.bias"] = layer.weight, layer.bias
    size = feature_size(config.env)
    header = PolicyHeader(
        spaces=config.env.spaces,
        feature_size=size,
        nvec=tuple(int(n) for n in model.action_space.nvec),
        layers=(size, *(layer.out_features for layer in linear)),
        algorithm=config.algorithm,
        timesteps=timesteps,
        seed=config.seed,
        profile_hash=config.profile_hash(),
        notes=f"{config.imitation_steps} steps of imitation, then {timesteps} of {config.algorithm}",
    )
    save_policy(folder, header, tensors)


def _evaluation(config: TrainConfig, folder: Path, say: Say) -> BaseCallback:
    """Evaluates and saves every `eval_every` timesteps."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Evaluation(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self._next = 0

        def _on_training_start(self) -> None:
            self._next = self.num_timesteps + config.eval_every

        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            if self.num_timesteps >= self._next:
                self._next = self.num_timesteps + config.eval_every
                evaluate_model(self.model, config, say, self.num_timesteps)
                save_checkpoint(folder, self.model, config, self.num_timesteps)

    return Evaluation()


def evaluate_model(model: Any, config: TrainConfig, say: Say, timesteps: int) -> dict[str, Any]:
    """Play a few episodes that training never sees, always the same, without exploration; log `eval/...`."""
    rewards, ratios = [], []
    for episode in range(_EVAL_EPISODES):
        env = training_env(config)
        vector, _ = env.reset(seed=_EVAL_SEED + episode)
        state, begins, total, done = None, np.ones(1, dtype=bool), 0.0, False
        plain_s = decode_s = 0.0
        while not done:
            options: dict[str, Any] = {"deterministic": True}
            if config.algorithm == "maskable-ppo":
                options["action_masks"] = env.action_masks()
            elif config.algorithm == "recurrent-ppo":
                options |= {"state": state, "episode_start": begins}
            action, state = model.predict(vector, **options)
            vector, reward, terminated, truncated, info = env.step(action)
            done, begins = terminated or truncated, np.zeros(1, dtype=bool)
            total += reward
            plain_s, decode_s = plain_s + info["plain_s"], decode_s + info["decode_s"]
        rewards.append(total)
        ratios.append(plain_s / decode_s if decode_s > 0 else 1.0)
    result = {
        "timesteps": timesteps,
        "mean_reward": float(np.mean(rewards)),
        "relative_goodput": float(np.mean(ratios)),
    }
    model.logger.record("eval/mean_reward", result["mean_reward"])
    model.logger.record("eval/relative_goodput", result["relative_goodput"])
    say(f"{timesteps} timesteps: reward {result['mean_reward']:.1f}, {result['relative_goodput']:.3f} x plain decoding")
    return result


def training_env(config: TrainConfig) -> TrainingEnv:
    """One environment of a run."""
    return TrainingEnv(config.scenarios, config.randomisation, config.env, config.random_share)


def _logger(folder: Path) -> Any:
    """SB3's logger: TensorBoard where it is installed, and a table for the learning curve."""
    from importlib.util import find_spec

    from stable_baselines3.common.logger import CSVOutputFormat, Logger, TensorBoardOutputFormat

    number = len(list(folder.glob("progress*.csv")))
    outputs: list[Any] = [CSVOutputFormat(str(folder / f"progress-{number}.csv"))]
    if find_spec("tensorboard") is not None:
        outputs.append(TensorBoardOutputFormat(str(folder / "tb")))
    else:
        _log.warning("no TensorBoard logs: pip install tensorboard")
    return Logger(folder=str(folder), output_formats=outputs)

"""The trained policy: its format, how it decides, how it is trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autopipe.core.errors import ConfigError
from autopipe.envs import EnvConfig
from autopipe.envs.config import SpaceConfig
from autopipe.envs.observation import observation_sizes
from autopipe.policies import make_policy
from autopipe.policies.base import Situation
from autopipe.policies.features import Features, feature_size
from autopipe.policies.rl_format import PolicyHeader, load_policy, save_policy
from autopipe.policies.rl_policy import Network, RlPolicy, optional_figures
from tests.envs.scenes import scenario
from tests.policies.helpers import SMALL, action, info, observation, play, situation

CONFIG = EnvConfig()
SIZE, NVEC = feature_size(CONFIG), (8, 5, 5, 5, 3, 2, 3, 2)


def saved(folder: Path, *, likes: int = 2, **changes: Any) -> Path:
    """A policy that likes one chain, whatever it sees."""
    torch.manual_seed(0)
    tensors = {
        "mean": torch.zeros(SIZE),
        "std": torch.ones(SIZE),
        "layers.0.weight": torch.randn(16, SIZE) * 0.1,
        "layers.0.bias": torch.zeros(16),
        "layers.1.weight": torch.zeros(sum(NVEC), 16),
        "layers.1.bias": torch.eye(sum(NVEC))[likes] * 5,
    }
    tensors |= changes.pop("tensors", {})
    header = PolicyHeader.parse(
        {"spaces": CONFIG.spaces, "feature_size": SIZE, "nvec": NVEC, "layers": (SIZE, 16, sum(NVEC)), **changes}
    )
    save_policy(folder, header, tensors)
    return folder


def test_it_chooses_what_the_network_likes_best(tmp_path: Path) -> None:
    policy = make_policy(saved(tmp_path, likes=4))
    policy.reset(situation())
    assert policy.act(observation(), info(situation().codec.off()))[0] == 4
    assert "medium" in policy.explain().text


def test_the_chain_in_force_stays_unless_another_is_liked_clearly_more(tmp_path: Path) -> None:
    likes = torch.zeros(sum(NVEC))
    likes[2], likes[4] = 5.0, 5.3
    folder, made = saved(tmp_path, tensors={"layers.1.bias": likes}), situation()
    chosen = {}
    for margin in (0.0, 0.5):
        policy = RlPolicy(folder, keep_margin=margin)
        policy.reset(made)
        policy._action = action(2)
        chosen[margin] = policy.act(observation(), info(made.codec.off()))[0]
    assert chosen == {0.0: 4, 0.5: 2}


def test_it_never_chooses_what_the_mask_forbids(tmp_path: Path) -> None:
    policy = RlPolicy(saved(tmp_path, likes=2))
    policy.reset(situation())
    mask = situation().codec.masks(None, 0, 1.0, dead=1 << SMALL)
    assert not int(policy.act(observation(), info(situation().codec.off(), action_mask=mask))[0]) >> SMALL & 1


def test_the_network_is_the_one_that_was_saved(tmp_path: Path) -> None:
    read = load_policy(saved(tmp_path))
    again = tmp_path / "again"
    save_policy(again, read.header, read.tensors)
    assert all((load_policy(again).tensors[name] == tensor).all() for name, tensor in read.tensors.items())


@pytest.mark.parametrize(("activation", "torch_activation"), [("tanh", torch.tanh), ("relu", torch.relu)])
@pytest.mark.parametrize("normalised", [True, False])
def test_the_network_computes_what_torch_would(
    tmp_path: Path, activation: str, torch_activation: Callable[[torch.Tensor], torch.Tensor], normalised: bool
) -> None:
    tensors = {
        "mean": torch.rand(SIZE, generator=torch.Generator().manual_seed(1)),
        "std": 1 + torch.rand(SIZE, generator=torch.Generator().manual_seed(2)),
        "layers.1.weight": torch.randn(sum(NVEC), 16, generator=torch.Generator().manual_seed(3)),
    }
    policy = load_policy(saved(tmp_path, tensors=tensors, activation=activation, normalised=normalised))
    features, kept = torch.rand(SIZE, generator=torch.Generator().manual_seed(4)), policy.tensors
    x = (features - kept["mean"]) / kept["std"] if normalised else features
    hidden = torch_activation(kept["layers.0.weight"] @ x + kept["layers.0.bias"])
    wanted = kept["layers.1.weight"] @ hidden + kept["layers.1.bias"]

    np.testing.assert_allclose(Network(policy)(features.numpy()), wanted.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", [0.0, 0.3], ids=["never missing in training", "often missing in training"])
def test_figures_that_training_always_had_are_taken_for_usual_where_they_are_missing(
    tmp_path: Path, share: float
) -> None:
    _, (figures, flags) = optional_figures(CONFIG)  # of telemetry
    mean, std = torch.full((SIZE,), 0.4), torch.full((SIZE,), 0.05)
    mean[flags] = share
    random = {"layers.1.weight": torch.randn(sum(NVEC), 16)}
    folder = saved(tmp_path, normalised=True, tensors={"mean": mean, "std": std, **random})
    network = Network(load_policy(folder))
    network.expect(optional_figures(CONFIG))
    usual = np.full(SIZE, 0.45, dtype=np.float32)
    usual[figures], usual[flags] = 0.4, share
    missing = usual.copy()
    missing[figures], missing[flags] = 0.0, 1.0
    assert np.allclose(network(missing), network(usual), atol=1e-4) == (share == 0.0)
    half = usual.copy()
    half[figures.start], half[flags.start] = 0.0, 1.0
    half[figures.start + 1] = 0.9
    there = usual.copy()
    there[figures.start + 1] = 0.9
    assert np.allclose(network(half), network(there), atol=1e-4) == (share == 0.0)
    assert not np.allclose(network(there), network(usual), atol=1e-4), "figures that are there count"


def test_a_machine_without_telemetry_gets_the_decision_of_one_with_the_usual_telemetry(tmp_path: Path) -> None:
    _, (figures, flags) = optional_figures(CONFIG)
    mean, std = torch.full((SIZE,), 0.4), torch.full((SIZE,), 0.05)
    mean[flags] = 0.0
    random = {"layers.1.weight": torch.randn(sum(NVEC), 16)}
    folder = saved(tmp_path, normalised=True, tensors={"mean": mean, "std": std, **random})
    seen, decisions = observation(), []
    for value, missing in ((0.4, 0.0), (0.0, 1.0)):
        policy = make_policy(folder)
        policy.reset(situation())
        telemetry = {
            "telemetry": np.full(figures.stop - figures.start, value, dtype=np.float32),
            "telemetry_missing": np.full(flags.stop - flags.start, missing, dtype=np.float32),
        }
        policy.act({**seen, **telemetry}, info(situation().codec.off()))
        decisions.append(policy.explain().text)
    assert decisions[0] == decisions[1]


def test_the_places_of_figures_are_those_of_the_features() -> None:
    for name, (figures, flags) in zip(("step_time", "telemetry"), optional_figures(CONFIG), strict=True):
        for part, place in ((name, figures), (f"{name}_missing", flags)):
            none, all_ = ({**observation(), part: np.full_like(observation()[part], value)} for value in (0, 1))
            vectors = [Features(situation()).vector(seen, info(situation().codec.off())) for seen in (none, all_)]
            changed = np.flatnonzero(vectors[0] != vectors[1])
            assert changed.tolist() == list(range(place.start, place.stop))


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    data = json.loads((tmp_path / "policy.json").read_text())
    (tmp_path / "policy.json").write_text(json.dumps({**data, "activation": "gelu"}))
    with pytest.raises(ConfigError, match="activation"):
        RlPolicy(tmp_path)


def test_other_spaces_are_refused_by_name(tmp_path: Path) -> None:
    policy = RlPolicy(saved(tmp_path))
    other = EnvConfig(spaces=SpaceConfig(windows=(1, 2, 4)))
    with pytest.raises(ConfigError, match=r"spaces\.windows"):
        policy.reset(Situation(other, situation().codec))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("mean", torch.zeros(3), "mean"),
        ("std", torch.zeros(SIZE), "std"),
        ("layers.0.weight", torch.full((16, SIZE), float("nan")), "NaN"),
        ("layers.1.bias", torch.zeros(4), r"layers\.1\.bias"),
    ],
)
def test_statistics_and_layers_that_do_not_match_are_refused(
    tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RlPolicy(saved(tmp_path, tensors={name: tensor}))


def test_another_format_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    data = json.loads((tmp_path / "policy.json").read_text())
    (tmp_path / "policy.json").write_text(json.dumps({**data, "format": 99}))
    with pytest.raises(ConfigError, match="format"):
        RlPolicy(tmp_path)


def test_unknown_keys_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.json"):
        RlPolicy(tmp_path)
    saved(tmp_path)
    data = json.loads((tmp_path / "policy.json").read_text())
    (tmp_path / "policy.json").write_text(json.dumps({**data, "code": "print(1)"}))
    with pytest.raises(ConfigError, match="code"):
        RlPolicy(tmp_path)


def test_a_pickle_in_place_of_the_weights_is_not_loaded(tmp_path: Path) -> None:
    saved(tmp_path)
    torch.save({"mean": torch.zeros(SIZE)}, tmp_path / "policy.safetensors")
    with pytest.raises(ConfigError, match="safetensors"):
        RlPolicy(tmp_path)


def test_features_are_bounded_and_remember_each_kind_of_text() -> None:
    features = Features(situation())
    off = situation().codec.off()
    for _ in range(3):
        vector = features.vector(observation(), info(off, agreement={"small": 0.9}, kind="code"))
    assert vector.shape == (SIZE,)
    assert 0 <= vector.min() <= vector.max() <= 1
    chat = features.vector(observation(), info(off, agreement={"small": 0.2}, kind="chat"))
    code = features.vector(observation(), info(off, kind="code"))
    agreement = sum(observation_sizes(CONFIG).values()) + SMALL  # behind the observation come fast averages, by slot
    assert chat[agreement] == pytest.approx(0.2)
    assert code[agreement] == pytest.approx(0.9)


def test_training_leaves_a_policy_a_curve_and_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    pytest.importorskip("sb3_contrib")
    from autopipe.policies import rl_train
    from autopipe.policies.learning_curve import read_progress

    settings = {
        "timesteps": 32,
        "envs": 2,
        "num_steps": 16,
        "batch_size": 16,
        "epochs": 1,
        "imitation_steps": 48,
        "hidden": (16,),
        "eval_every": 32,
        "env": {"max_steps": 24},
    }
    patched = pytest.MonkeyPatch()
    patched.setattr(rl_train, "_EVAL_EPISODES", 1)
    try:
        config = rl_train.TrainConfig.parse(settings)
        rl_train.train(config, tmp_path)
        first = load_policy(tmp_path / "policy")
        rl_train.train(config.replace(timesteps=64), tmp_path, resume=True)
        with pytest.raises(ConfigError, match="--resume"):
            rl_train.train(config.replace(seed=9), tmp_path, resume=True)
        with pytest.raises(ConfigError, match="--out"):
            rl_train.train(config, tmp_path)
    finally:
        patched.undo()
    second = load_policy(tmp_path / "policy")
    assert (first.header.timesteps, second.header.timesteps) == (32, 64)
    assert (first.tensors["layers.0.weight"] != second.tensors["layers.0.weight"]).any()
    assert [steps for steps, _ in read_progress(tmp_path)["eval/mean_reward"]] == [32, 64]
    assert play(RlPolicy(tmp_path / "policy"), scenario(), steps=5)[0] > 0


def test_random_scenarios_are_valid_and_a_function_of_the_seed() -> None:
    from autopipe.policies.random_scenarios import random_scenario

    drawn = [random_scenario(np.random.default_rng(seed)) for seed in range(30)]
    assert drawn[3] == random_scenario(np.random.default_rng(3))
    assert len({len(each.pipeline.drafters) for each in drawn}) > 1

"""Train the policy that ships with AutoPipe, as autopipe/policies/trained/recipe.md says.

    python scripts/train_policy.py FOLDER [TIMESTEPS]

FOLDER is resumed where it has a checkpoint. The policy is then in FOLDER/policy, to be copied to
autopipe/policies/trained together with progress.csv.
"""

from __future__ import annotations

import sys
from pathlib import Path

from autopipe.policies.learning_curve import plot_learning_curve
from autopipe.policies.rl_checkpoint import read_config
from autopipe.policies.rl_train import TrainConfig, train

SEED, IMITATION_STEPS, ENVS = 1, 15_000, 10


def main() -> None:
    import torch

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    timesteps = int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
    resume = (folder / "checkpoint.json").exists()
    if resume:
        config = read_config(folder)[0].replace(timesteps=timesteps)
    else:
        config = TrainConfig(timesteps=timesteps, seed=SEED, imitation_steps=IMITATION_STEPS, envs=ENVS)
    train(config, folder, resume=resume, say=lambda text: print(text, flush=True))
    print(plot_learning_curve(folder, folder / "learning-curve.png"))


if __name__ == "__main__":
    main()

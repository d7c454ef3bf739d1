#!/usr/bin/env python
"""A copy of a model whose weights were never rounded to 4 bits: what `int4` is worth where it has something to round.

    python scripts/shake_weights.py --model smollm2-135m --out /tmp/shaken
    autopipe bench --target /tmp/shaken --prompts chat:8 --compare plain,plain:dtype=int4,plain:dtype=int8
    autopipe bench --target /tmp/shaken --prompts chat:8 --compare plain,lockstep:drafter=int4

The default model was quantised to 4 bits by its authors, so `int4` nearly restores its weights and agrees with it more
often than it would with another model. Here every weight moves at random within half a step of the 4-bit grid of its
group (32 inputs of a row, from the smallest to the largest), which makes a model about as far from the first one as
rounding did, with weights that lie on no grid.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from autopipe.core.models import load_config, load_state, load_tokenizer, resolve

GROUP = 32
STEPS = 15


def shaken(weight: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """[rows, inputs] -> the same shape, each weight moved by up to half a step of its group."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / STEPS
    noise = torch.rand(groups.shape, generator=chance) - 0.5
    return (groups + noise * step).flatten(1).to(weight.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    source, chance = resolve(options.model), torch.Generator().manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    state = {
        name: shaken(weight, chance) if name.endswith("_proj.weight") else weight.contiguous()
        for name, weight in load_state(source).items()
    }
    load_config(source).save_pretrained(options.out)
    load_tokenizer(source).save_pretrained(options.out)
    save_file(state, options.out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()

"""A placement as the keys of a plan: `device`, `device_map` (accelerate's), `dtype`."""

from __future__ import annotations

from autopipe.core.placement.place import Placement, StagePlacement
from autopipe.core.plan import BackendName, Plan, StagePlan


def device_map(stage: StagePlacement) -> dict[str, int | str]:
    """accelerate's device map of a decoder of the Llama family: module name -> device."""
    layers = stage.layers()
    placed: dict[str, int | str] = {
        "model.embed_tokens": _index(layers[0].name),
        "model.rotary_emb": _index(layers[0].name),
    }
    placed.update({f"model.layers.{index}": _index(device.name) for index, device in enumerate(layers)})
    placed["model.norm"] = placed["lm_head"] = _index(layers[-1].name)
    if stage.candidate.sizes.tied:  # one tensor cannot be in two places: the head stays with the embedding
        placed["lm_head"] = placed["model.embed_tokens"]
    return placed


def apply_placement(plan: Plan, placement: Placement) -> Plan:
    """The plan with every neural stage told where to be. Stages are matched by name."""
    by_name = {stage.name: stage for stage in placement.stages}
    chain = [
        _placed(stage, by_name[name]) if name in by_name else stage
        for name, stage in zip(plan.names(), plan.chain, strict=True)
    ]
    return plan.replace(chain=chain)


def _placed(stage: StagePlan, where: StagePlacement) -> StagePlan:
    if len(where.parts) == 1:
        return stage.replace(device=where.parts[0].device.name, device_map=None, dtype=where.candidate.dtype)
    return stage.replace(
        backend=BackendName.TRANSFORMERS, device="auto", device_map=device_map(where), dtype=where.candidate.dtype
    )


def _index(device: str) -> int | str:
    return int(device.removeprefix("cuda:")) if device.startswith("cuda:") else device

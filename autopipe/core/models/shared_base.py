"""Drafters that are the target's own first (or other) layers plus an adapter: their folder, and the base under it.

A drafter's folder is a PEFT adapter (adapter_config.json, adapter_model.safetensors) with two files of ours:
drafter.json says which layers of which model it sits on, drafter.safetensors which tokens its output head has.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    import torch

    from autopipe.core.plan import StagePlan

FORMAT = "autopipe-drafter-1"
INFO_FILE, IDS_FILE = "drafter.json", "drafter.safetensors"
MODULES = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
"""The matrices of a layer, by the module they are in."""


def is_layer_matrix(module: str) -> bool:
    """Whether a module of this name (`model.layers.3.mlp.up_proj`) is one of a layer's matrices."""
    head, _, name = module.rpartition(".")
    layer, _, group = head.rpartition(".")
    return name in MODULES.get(group, ()) and layer.rpartition(".")[0].endswith("layers")


def layers_of_drafters(stages: Iterable[StagePlan], target: StagePlan) -> tuple[int, ...]:
    """Layers of `target` that drafters among `stages` are made of: what its process is to share with theirs.

    Drafters that cannot be read have none here; loading them says what is wrong. A target with an adapter of its own
    has other weights than they.
    """
    if target.adapter is not None:
        return ()
    layers: set[int] = set()
    for stage in stages:
        if stage.adapter is None or not _same_weights(stage, target):
            continue
        for adapter in (stage.adapter, *stage.adapters):
            folder = adapter_folder(adapter)
            if is_shared_base_drafter(folder):
                with contextlib.suppress(ConfigError):
                    layers.update(read_drafter_info(folder).layers)
    return tuple(sorted(layers))


def _same_weights(stage: StagePlan, target: StagePlan) -> bool:
    """Whether two stages have, as far as a plan says, the same model in the same numbers."""
    from autopipe.core.models.spec import resolve

    if stage.dtype != target.dtype and "auto" not in (stage.dtype, target.dtype):
        return False
    try:
        return stage.model == target.model or resolve(stage.model) == resolve(target.model)
    except ConfigError:
        return False


_FINGERPRINT_ROWS = 16

SHIPPED = {"smollm2-135m": "smollm2-135m.neural"}
"""Drafters that come with AutoPipe, by the name of their target."""

_SHIPPED_FOLDER = Path(__file__).parent.parent.parent / "drafters"


def adapter_folder(adapter: str) -> str:
    """The folder of an adapter named in a plan: a shipped drafter's for a name in `SHIPPED`, else the folder itself."""
    shipped = SHIPPED.get(adapter)
    return adapter if shipped is None or Path(adapter).is_dir() else str(_SHIPPED_FOLDER / shipped)


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What drafter.json says.

    Attributes:
        base: how the target was named when the drafter was made; for messages.
        base_fingerprint: `weights_fingerprint` of the target.
        tokenizer: `tokenizer_fingerprint` of the target's tokenizer.
        layers: layers of the target that the drafter runs, in this order.
        vocab_size: rows of the target's output head.
        head_size: rows of the drafter's output head.
    """

    base: str
    base_fingerprint: str
    tokenizer: str
    layers: tuple[int, ...]
    vocab_size: int
    head_size: int


def is_shared_base_drafter(folder: str | Path) -> bool:
    """Whether an adapter's folder says that it sits on a truncated base."""
    return (Path(folder).expanduser() / INFO_FILE).is_file()


def save_drafter_info(folder: Path, info: DrafterInfo, head_ids: torch.Tensor, notes: Mapping[str, Any]) -> None:
    """Write drafter.json and drafter.safetensors into a folder.

    Args:
        head_ids: token id of every row of the drafter's head, int32 [head_size], ascending.
        notes: how it was trained; for people, and kept by a training that begins with this drafter.
    """
    from safetensors.torch import save_file

    save_file({"head_ids": head_ids.contiguous()}, folder / IDS_FILE)
    data = {"format": FORMAT, **asdict(info), "training": dict(notes)}
    (folder / INFO_FILE).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_drafter_info(folder: str | Path, key: str = "adapter") -> DrafterInfo:
    """What a drafter's folder says of itself.

    Raises:
        ConfigError: it is no such folder, or it is damaged; the message names `key`.
    """
    path = Path(folder).expanduser()
    allowed = f"a folder made by `autopipe drafts distill` (with {INFO_FILE} and {IDS_FILE})"
    for name in (INFO_FILE, IDS_FILE):
        if not (path / name).is_file():
            raise ConfigError(key, str(folder), f"{allowed}; there is no {name}")
    try:
        data = json.loads((path / INFO_FILE).read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, not {FORMAT!r}")
        info = DrafterInfo(
            base=str(data["base"]),
            base_fingerprint=str(data["base_fingerprint"]),
            tokenizer=str(data["tokenizer"]),
            layers=tuple(int(layer) for layer in data["layers"]),
            vocab_size=int(data["vocab_size"]),
            head_size=int(data["head_size"]),
        )
        if not info.layers or min(info.layers) < 0 or not 0 < info.head_size <= info.vocab_size:
            raise ValueError("its layers or sizes make no sense")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(key, str(folder), f"{allowed}; {INFO_FILE} cannot be used: {error!r}") from None
    return info


def read_head_ids(folder: str | Path, info: DrafterInfo, key: str = "adapter") -> torch.Tensor:
    """The draft-to-target map: token id of every row of the drafter's head, int64 [head_size].

    Raises:
        ConfigError: damaged, or ids that are not ascending ids of the target.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    wrong = f"a drafter whose {IDS_FILE} holds `head_ids`: {info.head_size} ascending ids below {info.vocab_size}"
    try:
        ids = load_file(Path(folder).expanduser() / IDS_FILE)["head_ids"].long()
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(key, str(folder), f"{wrong} ({error})") from None
    in_range = ids.ndim == 1 and len(ids) == info.head_size and ids[0] >= 0 and ids[-1] < info.vocab_size
    if not in_range or not bool((ids[1:] > ids[:-1]).all()):
        raise ConfigError(key, str(folder), wrong)
    return ids


def weights_fingerprint(state: Mapping[str, torch.Tensor]) -> str:
    """16 hexadecimal digits of a model's norms and first embeddings in bf16.

    Trainings differ in them; copies and file formats do not.

    Args:
        state: a state dict with transformers' names; only these few numbers are read.
    """
    import torch

    parts = {name: state[name] for name in state if name.endswith("norm.weight")}
    parts |= {name: state[name][:_FINGERPRINT_ROWS] for name in state if name.endswith("embed_tokens.weight")}
    digest = hashlib.sha256()
    for name, tensor in sorted(parts.items()):
        digest.update(name.removeprefix("model.").encode())
        digest.update(tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def check_drafter(folder: str, config: Any, state: Mapping[str, torch.Tensor], key: str = "adapter") -> DrafterInfo:
    """Check a drafter against its target, reading little: its own small files, headers, and the target's norms.

    Args:
        config, state: of the target; the state may be mapped from disk.
        key: the user's key of `folder`, for messages.

    Raises:
        ConfigError: the folder holds no usable drafter.
        ModelLoadError: it was made for another target, or its tensors do not fit this one.
        UnsupportedModelError: an adapter of a kind that cannot be merged.
    """
    from autopipe.core.models.adapters import check_lora, read_adapter_config

    info = read_drafter_info(folder, key)
    read_adapter_config(folder, key)
    head_ids = read_head_ids(folder, info, key)
    if info.vocab_size != config.vocab_size:
        raise ModelLoadError(
            f"{key}: the drafter {folder} was made for a vocabulary of {info.vocab_size} tokens ({info.base}); "
            f"this target has {config.vocab_size}"
        )
    if max(info.layers) >= config.num_hidden_layers:
        raise ModelLoadError(
            f"{key}: the drafter {folder} has layer {max(info.layers)}; this target has {config.num_hidden_layers}"
        )
    if info.base_fingerprint != weights_fingerprint(state):
        raise ModelLoadError(
            f"{key}: the drafter {folder} was made from other weights ({info.base}, fingerprint "
            f"{info.base_fingerprint}); make one for this target with `autopipe drafts distill`"
        )
    check_lora(folder, truncated_state(state, info.layers, head_ids))
    return info


def truncated_config(config: Any, layers: Sequence[int]) -> Any:
    """The target's transformers config with only so many layers, and a head of its own."""
    truncated = copy.deepcopy(config)
    truncated.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        truncated.layer_types = [config.layer_types[layer] for layer in layers]
    truncated.tie_word_embeddings = False
    return truncated


def truncated_state(
    state: Mapping[str, torch.Tensor], layers: Sequence[int], head_ids: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The weights of the truncated base: chosen layers renumbered, the head's rows of the kept tokens.

    Raises:
        ModelLoadError: the target has no such layer.
    """
    kept = {}
    for name, tensor in state.items():
        prefix, dot, rest = name.partition("layers.")
        if not dot:
            kept[name] = tensor
            continue
        number, _, tail = rest.partition(".")
        for position, layer in enumerate(layers):
            if int(number) == layer:
                kept[f"{prefix}layers.{position}.{tail}"] = tensor
    found = {name.partition("layers.")[2].partition(".")[0] for name in kept if "layers." in name}
    if len(found) < len(layers):
        raise ModelLoadError(f"layers {list(layers)}: the target has not all of these layers")
    head = state["lm_head.weight"] if "lm_head.weight" in state else state["model.embed_tokens.weight"]
    kept["lm_head.weight"] = head[head_ids]
    return kept


def truncated_base(
    config: Any, state: Mapping[str, torch.Tensor], layers: Sequence[int], head_ids: torch.Tensor
) -> Any:
    """The truncated base as a transformers model in fp32: what `peft` loads the adapter on.

    Its config's vocab_size is that of the input embedding; the output head has fewer rows.

    Raises:
        ModelLoadError: the target has no such layer, or its weights are not those of its config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(truncated_config(config, layers), dtype=torch.float32)
    model.lm_head = torch.nn.Linear(config.hidden_size, len(head_ids), bias=False)
    try:
        model.load_state_dict(truncated_state(state, layers, head_ids))
    except RuntimeError as error:
        raise ModelLoadError(f"the target's weights do not fit its config: {error}") from None
    return model.eval()

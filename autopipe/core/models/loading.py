"""Reading a model's config, weights, tokenizer and end-of-text ids, without building the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import ConfigError, ModelLoadError
from autopipe.core.models.cache import Progress
from autopipe.core.models.spec import ALLOWED, ModelSource, SourceKind
from autopipe.core.plan import FEWER_BITS, Dtype

if TYPE_CHECKING:
    import torch

_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


def local_folder(source: ModelSource, *, weights: bool = True, progress: Progress | None = None) -> Path:
    """The folder with the model's files: downloaded or converted first, where that is needed.

    Args:
        source: from `resolve`.
        weights: false: the small files (config, tokenizer) are enough. GGUF files are converted either way.
        progress: told when something slow begins.

    Raises:
        ConfigError: a hub id that is neither cached nor reachable.
        ModelLoadError: the default model's package is not installed, or a GGUF file cannot be converted.
    """
    if source.kind is SourceKind.FOLDER:
        return Path(source.location)
    if source.kind is SourceKind.DEFAULT:
        from autopipe.core.models.default_model import default_folder

        return default_folder(progress)
    from autopipe.core.models.gguf import converted_folder

    if source.kind is SourceKind.GGUF_FILE:
        return converted_folder(Path(source.location), progress)
    if source.kind is SourceKind.GGUF_HUB:
        folder = _hub_folder(source, [str(source.gguf_file)], progress)
        return converted_folder(folder / str(source.gguf_file), progress)
    return _hub_folder(source, [*_SMALL_FILES, "*.safetensors"] if weights else _SMALL_FILES, progress)


def _hub_folder(source: ModelSource, patterns: list[str], progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if progress is not None:
        progress(f"looking up {source}")
    try:
        folder = Path(snapshot_download(source.location, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        allowed = f"{ALLOWED}; as a hub id it cannot be found ({reason})"
        raise ConfigError(source.key, str(source), allowed) from None
    wanted = source.gguf_file or "config.json"
    if not (folder / wanted).is_file():
        raise ConfigError(source.key, str(source), f"a hub repository with {wanted}")
    return folder


def load_config(source: ModelSource, *, trust_remote_code: bool = False, progress: Progress | None = None) -> Any:
    """The model's transformers config (`PreTrainedConfig`).

    Raises:
        ConfigError, ModelLoadError: as `local_folder`; and a config transformers does not know.
    """
    from transformers import AutoConfig

    folder = local_folder(source, weights=False, progress=progress)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{source.key}: the config of {source} cannot be read: {error}") from error


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False, progress: Progress | None = None) -> Any:
    """The model's tokenizer, chat template included.

    Raises:
        ConfigError, ModelLoadError: as `local_folder`; and a tokenizer that is missing or cannot be read.
    """
    from transformers import AutoTokenizer

    folder = local_folder(source, weights=False, progress=progress)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"{source.key}: the tokenizer of {source} cannot be read: {error}") from error


def eos_token_ids(source: ModelSource) -> tuple[int, ...]:
    """Ids that end the model's text, as transformers' `generate` would use them.

    From generation_config.json, else config.json, else the tokenizer; empty if none of them says.
    """
    folder = local_folder(source, weights=False)
    for file in ("generation_config.json", "config.json"):
        value = _read_json(folder / file).get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(item) for item in value)
    try:
        value = load_tokenizer(source).eos_token_id
    except ModelLoadError:
        return ()
    return () if value is None else (int(value),)


def stored_dtype(source: ModelSource) -> torch.dtype:
    """The dtype of most of the stored weights, from the safetensors headers."""
    from collections import Counter

    import torch
    from safetensors import safe_open

    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    sizes: Counter[str] = Counter()
    for file in weight_files(source):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                part = tensors.get_slice(key)
                count = 1
                for length in part.get_shape():
                    count *= length
                sizes[part.get_dtype()] += count
    most = sizes.most_common(1)[0][0] if sizes else "none"
    if most not in names:
        raise ModelLoadError(f"{source.key}: {source} is stored as {most}; supported: F32, BF16, F16")
    return names[most]


def choose_dtype(dtype: Dtype, source: ModelSource, device: str = "cpu") -> torch.dtype:
    """The dtype to compute in.

    `auto` on a CPU: bf16 when the weights are stored in bf16 or fp16 (fp16 is slow there and overflows easily),
    else fp32. `auto` elsewhere: the dtype the weights are stored in.
    """
    import torch

    if dtype in FEWER_BITS:
        return torch.bfloat16  # of what is not quantised, and of activations
    if dtype is not Dtype.AUTO:
        return {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}[dtype]
    stored = stored_dtype(source)
    return torch.bfloat16 if device == "cpu" and stored is torch.float16 else stored


def weight_files(source: ModelSource, progress: Progress | None = None) -> list[Path]:
    """The safetensors files of a model, one or many.

    Raises:
        ModelLoadError: there are none; pickled checkpoints are never read.
    """
    folder = local_folder(source, progress=progress)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        files = [folder / str(name) for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelLoadError(f"{source.key}: {source} lacks the weight files {', '.join(missing)}")
        return files
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        raise ModelLoadError(
            f"{source.key}: {source} holds its weights as pickle ({', '.join(pickled[:3])}), which can run code "
            "when read and is refused; save the model again with save_pretrained, which writes safetensors"
        )
    raise ModelLoadError(f"{source.key}: {source} holds no model.safetensors")


def load_state(
    source: ModelSource,
    dtype: torch.dtype | None = None,
    *,
    adapter: str | None = None,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """The weights by name, as stored in the checkpoint (tied weights once), on the CPU.

    Files are memory-mapped; a tensor is copied only where its dtype changes or an adapter is merged into it.

    Args:
        source: from `resolve`.
        dtype: of the floating point tensors returned; None: as stored.
        adapter: folder of a LoRA adapter to merge.
        progress: told when something slow begins.

    Raises:
        ModelLoadError: no safetensors weights, or an adapter that does not fit them.
        UnsupportedModelError: an adapter of a kind that cannot be merged here.
    """
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for file in weight_files(source, progress):
        try:
            state.update(load_file(file))
        except Exception as error:  # safetensors' own error type is not public in all releases
            raise ModelLoadError(f"{file} cannot be read as safetensors: {error}") from error
    if adapter is not None:
        from autopipe.core.models.adapters import merge_lora

        state = merge_lora(state, adapter)
    if dtype is not None:
        state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
    return state


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return data if isinstance(data, dict) else {}

"""GGUF files: unpacked once into a cached Hugging Face folder, so that the next load takes a moment."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from autopipe.core.errors import AutoPipeError, ModelLoadError
from autopipe.core.models.cache import Progress, cache_dir, file_digest, make_once
from autopipe.core.models.quiet import no_progress_bars

_FORMAT = "1"  # part of the key of cached conversions: raise it when what is written changes
_logger = logging.getLogger(__name__)


def converted_folder(file: Path, progress: Progress | None = None) -> Path:
    """The cached Hugging Face folder made from a GGUF file; made now if missing.

    Quantised weights become bf16; a file that holds fp32 or fp16 matrices keeps that dtype.

    Args:
        file: an existing GGUF file.
        progress: told when a conversion begins, which takes some seconds per 100 MB.

    Raises:
        ModelLoadError: the file is not GGUF, or of an architecture transformers cannot read.
    """
    digest = file_digest(file, salt=_FORMAT)
    name = re.sub(r"[^\w.-]+", "-", file.stem)
    entry = cache_dir() / "models" / f"{name}-{digest}"

    def build(folder: Path) -> None:
        message = f"converting {file.name} (once, kept in {entry.parent})"
        _logger.info(message)
        if progress is not None:
            progress(message)
        try:
            with no_progress_bars():
                _convert(file, folder)
        except AutoPipeError:
            raise
        except Exception as error:  # transformers raises anything for a file it dislikes
            raise ModelLoadError(f"{file} cannot be read as a language model in GGUF: {error}") from error

    return make_once(entry, build)


def is_converted(file: Path) -> bool:
    """Whether the conversion is already in the cache."""
    name = re.sub(r"[^\w.-]+", "-", file.stem)
    return (cache_dir() / "models" / f"{name}-{file_digest(file, salt=_FORMAT)}").is_dir()


def _convert(file: Path, folder: Path) -> None:
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors if len(tensor.shape) > 1}
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=_dtype(kinds), attn_implementation="eager", **_dense()
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    fresh_config = type(model.config).from_dict(config)
    generation = GenerationConfig.from_model_config(fresh_config)
    if tokenizer.eos_token_id is not None:
        generation.eos_token_id = tokenizer.eos_token_id
    # A model loaded from GGUF refuses save_pretrained; a fresh one with the same weights does not.
    fresh = AutoModelForCausalLM.from_config(fresh_config, dtype=model.dtype)
    fresh.load_state_dict(model.state_dict())
    fresh.generation_config = generation
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dtype(kinds: set[str]) -> Any:
    import torch

    if kinds == {"F32"}:
        return torch.float32
    return torch.float16 if kinds <= {"F16", "F32"} else torch.bfloat16


def _dense() -> dict[str, Any]:
    """Arguments that make transformers unpack the weights (releases with packed GGUF leave them packed)."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}

"""Where models come from: specs, the default model, files on disk, tokenizers."""

from autopipe.core.models.cache import cache_dir
from autopipe.core.models.loading import (
    choose_dtype,
    eos_token_ids,
    load_config,
    load_state,
    load_tokenizer,
    local_folder,
    stored_dtype,
)
from autopipe.core.models.spec import DEFAULT_MODEL, REGISTRY, ModelSource, SourceKind, resolve
from autopipe.core.models.tokenizers import require_same_tokenizer, tokenizer_fingerprint

__all__ = [
    "DEFAULT_MODEL",
    "REGISTRY",
    "ModelSource",
    "SourceKind",
    "cache_dir",
    "choose_dtype",
    "eos_token_ids",
    "load_config",
    "load_state",
    "load_tokenizer",
    "local_folder",
    "require_same_tokenizer",
    "resolve",
    "stored_dtype",
    "tokenizer_fingerprint",
]

"""What callers hand over (text, token ids, transformers' spellings), checked and turned into what the engine takes."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopipe.core.errors import ConfigError
from autopipe.core.sampling import SamplingParams

_TRANSFORMERS_NAMES = {"eos_token_id": "eos_token_ids", "stop_strings": "stop"}
_EXCERPT = 12


def require_text(text: Any, key: str) -> str:
    """`text`, if it can be tokenised: a string that UTF-8 can write.

    Python keeps bytes that are not UTF-8 (of arguments, of files) as lone surrogates, which no tokenizer takes.

    Raises:
        ConfigError: not a string, or one with lone surrogates.
    """
    if not isinstance(text, str):
        raise ConfigError(key, text, "a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        excerpt = text[max(0, error.start - _EXCERPT) : error.start + _EXCERPT]
        raise ConfigError(key, excerpt, f"valid UTF-8 text; character {error.start} (from 0) is none") from None
    return text


def require_writable(path: str | Path, key: str) -> None:
    """Check that a file can be written at `path`, without writing it.

    Raises:
        ConfigError: a folder, a file in a folder that does not exist, or one that may not be written.
    """
    file = Path(path)
    allowed = "a file that can be written, in a folder that exists"
    if file.is_dir():
        raise ConfigError(key, str(path), f"{allowed}; this is a folder")
    if not file.parent.is_dir():
        raise ConfigError(key, str(path), f"{allowed}; there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(key, str(path), f"{allowed}; there is no permission to")


def single_row(value: Any, key: str = "input_ids") -> list[int]:
    """One row of token ids from a list, an array or a tensor, [n] or [1, n].

    Raises:
        ConfigError: several rows, or something in it is not a whole number.
    """
    ids = _listed(value, key)
    if ids and not _is_number(ids[0]):
        if len(ids) != 1:
            raise ConfigError(key, f"{len(ids)} rows", "one row; submit several prompts one by one")
        ids = _listed(ids[0], key)
    try:
        return [operator.index(token) for token in ids]
    except TypeError:
        bad = next(token for token in ids if not hasattr(token, "__index__"))
        raise ConfigError(key, bad, "whole numbers: the ids of tokens") from None


def require_no_padding(attention_mask: Any, num_tokens: int) -> None:
    """Accept an attention mask that hides nothing, as a tokenizer makes for a single prompt.

    Raises:
        ConfigError: the mask hides tokens, or is not as long as the prompt.
    """
    mask = _listed(attention_mask, "attention_mask")
    if len(mask) == 1 and not _is_number(mask[0]):
        mask = _listed(mask[0], "attention_mask")
    if len(mask) != num_tokens:
        raise ConfigError("attention_mask", f"{len(mask)} entries", f"one for each of the {num_tokens} input_ids")
    if any(not _is_number(entry) or entry != 1 for entry in mask):
        allowed = "all ones: a prompt is one row without padding; cut the padding off input_ids"
        raise ConfigError("attention_mask", "zeros among the entries", allowed)


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` from keyword arguments, transformers' spellings included.

    `pad_token_id` is taken and has no effect: a request is one row, and nothing is padded.

    Raises:
        ConfigError: an unknown option or a value that is not allowed.
    """
    known = {_TRANSFORMERS_NAMES.get(key, key): value for key, value in options.items() if key != "pad_token_id"}
    do_sample = known.pop("do_sample", None)
    if do_sample is False:
        known["temperature"] = 0.0
    elif do_sample:
        known.setdefault("temperature", 1.0)
        if known["temperature"] == 0:
            raise ConfigError("temperature", 0, "above 0 with do_sample=True")
    eos = known.get("eos_token_ids")
    if isinstance(eos, int):
        known["eos_token_ids"] = (eos,)
    return SamplingParams.parse({key: value for key, value in known.items() if value is not None})


def _listed(value: Any, key: str) -> Sequence[Any]:
    items = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        allowed = "a list, an array or a tensor of one row; a tokenizer's output goes in as generate(**output)"
        raise ConfigError(key, type(value).__name__, allowed)
    return list(items)


def _is_number(item: Any) -> bool:
    return not isinstance(item, str | bytes) and (getattr(item, "ndim", None) == 0 or not hasattr(item, "__len__"))

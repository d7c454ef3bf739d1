"""Keeps transformers' progress bars off the terminal, where AutoPipe shows its own progress."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Within the block transformers shows no progress bars; afterwards, those it showed before."""
    from transformers.utils import logging

    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # The reader of GGUF files takes tqdm directly, past transformers' own switch.
    try:
        reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    except ImportError:
        reader = None
    bar = getattr(reader, "tqdm", None)
    if bar is not None:
        reader.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        if bar is not None:
            reader.tqdm = bar
        if were_shown:
            logging.enable_progress_bar()

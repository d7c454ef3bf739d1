"""Weights quantised by a library where our own kernels do not reach: on a GPU, and int8 on a CPU without them.

int8 by torchao (weight-only), 4 bits on a GPU by bitsandbytes (NF4). For a drafter this costs no quality, since what it
drafts is verified; a target becomes another model. Not yet run on a GPU. bitsandbytes rounds a row by how many are
computed (seen on its CPU path), so an exact plan cannot have its weights in the target: see `preflight.py`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from autopipe.core.plan import Dtype


def library_for(dtype: Dtype, device: str) -> str | None:
    """The library that quantises to `dtype` on `device`; None: there is none."""
    if dtype is Dtype.INT8:
        return "torchao"
    return "bitsandbytes" if device.startswith("cuda") else None


def reason_missing(dtype: Dtype, device: str) -> str | None:
    """Why no library can quantise to `dtype` on `device`; None when one can."""
    library = library_for(dtype, device)
    if library is None:
        return f"no library quantises to {dtype.value} on {device}"
    if importlib.util.find_spec(library) is None:
        return f"{library} is not installed: pip install {library}"
    return None


def is_exact(dtype: Dtype) -> bool:
    """Whether a row's bits can be kept from depending on how many rows are computed."""
    return dtype is not Dtype.INT4


def quantisation_config(dtype: Dtype, device: str) -> Any:
    """transformers' `quantization_config` for `dtype` on `device`. The output head stays in 16 bits."""
    if library_for(dtype, device) == "bitsandbytes":
        import torch
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())

"""How the kernels' matrices may be packed."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class WeightFormat(IntEnum):
    """How matrices are packed; AutopipeFormat in common.h."""

    FP32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3

    @classmethod
    def of(cls, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are not quantised."""
        import torch

        return cls.BF16 if dtype == torch.bfloat16 else cls.FP32

    @property
    def quantised(self) -> bool:
        return self in (WeightFormat.INT8, WeightFormat.INT4)

"""Linear layers of transformers models on AutoPipe's own CPU kernels.

A row's result does not depend on how many rows are computed, nor on the number of threads, and each weight is read
from memory once for all of up to 256 rows. So an exact forward needs no padding rows.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from autopipe.core.affinity import usable_cores
from autopipe.core.kernels import has_kernels, native
from autopipe.core.kernels.formats import WeightFormat
from autopipe.core.kernels.native import VECTOR_PADDING, Memory, Team
from autopipe.core.kernels.packing import pack_matrix, packed_shape
from autopipe.core.kernels.quantise import pack_quantised, packed_bytes
from autopipe.core.kernels.structs import MatmulJob

_MAX_ROWS = 256
_DTYPES = (torch.bfloat16, torch.float32)


class KernelLinear(torch.nn.Module):
    """Takes the place of a `torch.nn.Linear` (or GPT-2's Conv1D); inference only.

    `weight` keeps dtype and shape for code that asks for them, but no numbers.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        team: KernelTeam,
        store: WeightStore | None = None,
        weights: WeightFormat | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)
        self._packed = _pack(weight.detach(), weights, store)
        self._team = team
        self._store = store  # keeps the memory behind the packed weight
        self._float_bias = None if bias is None else bias.detach().float().contiguous()
        self._job = MatmulJob(
            format=weights or WeightFormat.of(weight.dtype),
            inputs=self.in_features,
            outputs=self.out_features,
            weights=self._packed.data_ptr(),
            bias=None if self._float_bias is None else self._float_bias.data_ptr(),
        )

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weight as the kernels read it."""
        return self._packed.numel() * self._packed.element_size()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], in the dtype given; sums in float32.

        Raises:
            RuntimeError: as torch's own layer would, another number of inputs.
        """
        if rows.shape[-1] != self.in_features:
            raise RuntimeError(f"a linear layer of {self.in_features} inputs was given {rows.shape[-1]}")
        x = (rows if rows.dtype in _DTYPES else rows.float()).contiguous()
        output = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype)
        self._team.multiply(self._job, x, output)
        return output if output.dtype is rows.dtype else output.to(rows.dtype)


class WeightStore:
    """One allocation on huge pages for all packed weights of a model: streaming over small pages is slower."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = Memory(num_bytes)
        self._used = 0

    def room(self, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """The next so many bytes, as one row of numbers; valid while the store lives."""
        view = self._memory.tensor(self._used, [num_bytes // dtype.itemsize], dtype)
        self._used += num_bytes
        return view


class KernelTeam:
    """The threads shared by a model's `KernelLinear`s; may be replaced between forwards."""

    def __init__(self, threads: int | None) -> None:
        self.team = Team(threads or usable_cores())
        # Looked up once: a forward makes hundreds of products, some of them shorter than a look-up.
        self._multiply = native.native_library().autopipe_matmul
        self._isa = native.isa_number(None)
        self._converted: dict[int, torch.Tensor] = {}

    def multiply(self, job: Any, x: torch.Tensor, output: torch.Tensor) -> None:
        """Run one product of contiguous rows, fp32 or bf16; they are brought into the kernels' form in a buffer kept
        per width."""
        buffer = self._converted.get(job.inputs)
        if buffer is None:
            buffer = torch.zeros(_MAX_ROWS, job.inputs + -job.inputs % VECTOR_PADDING, dtype=torch.float32)
            self._converted[job.inputs] = buffer
        job.converted = buffer.data_ptr()
        job.bf16_rows = x.dtype is torch.bfloat16
        size, job.x, job.out = x.element_size(), x.data_ptr(), output.data_ptr()
        left = x.numel() // job.inputs
        while left:
            job.rows = min(left, _MAX_ROWS)
            self._multiply(self._isa, ctypes.byref(job), self.team.handle)
            left -= job.rows
            if left:
                job.x, job.out = job.x + job.rows * job.inputs * size, job.out + job.rows * job.outputs * size

    def set_threads(self, threads: int) -> None:
        if threads != self.team.threads:
            old, self.team = self.team, Team(threads)
            old.close()


class KernelLinears:
    """The linear layers of one model, moved to the kernels; `restore` moves them back, `commit` makes it final."""

    def __init__(self, model: torch.nn.Module, threads: int | None, weights: WeightFormat | None = None) -> None:
        self.team = KernelTeam(threads)
        self._replaced = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if _matrix(child) is not None
        ]
        matrices = [weight for *_, child in self._replaced if (weight := _matrix(child)) is not None]
        store = WeightStore(sum(_packed_bytes(weight, weights) for weight in matrices))
        for parent, name, child in self._replaced:
            weight = _matrix(child)
            bias: Any = child.bias
            if weight is not None:
                setattr(parent, name, KernelLinear(weight, bias, self.team, store, weights))

    def restore(self) -> None:
        """Put the model's own layers back."""
        for parent, name, child in self._replaced:
            setattr(parent, name, child)
        self.commit()

    def commit(self) -> None:
        """Let go of the model's own layers, and so of their memory."""
        self._replaced.clear()


def fits_kernels(model: torch.nn.Module) -> bool:
    """Whether the kernels run here, and this model's linear layers are on the CPU in bf16 or fp32."""
    matrices = [weight for module in model.modules() if (weight := _matrix(module)) is not None]
    return bool(matrices) and has_kernels() and all(weight.device.type == "cpu" for weight in matrices)


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's weights as they are in memory: packed, or quantised by a library, where they are."""
    packed = {id(module.weight): module.packed_bytes for module in model.modules() if isinstance(module, KernelLinear)}
    return sum(packed.get(id(parameter), _stored_bytes(parameter)) for parameter in model.parameters())


def _stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; of a subclass that only wraps others (torchao's quantised weights), of those."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.numel() * tensor.element_size()
    names, _ = flatten()
    return sum(_stored_bytes(getattr(tensor, name)) for name in names)


def _pack(weight: torch.Tensor, weights: WeightFormat | None, store: WeightStore | None) -> torch.Tensor:
    """The kernels' form of a weight, in the store if there is one."""
    dtype = weight.dtype if weights is None else torch.uint8
    room = None if store is None else store.room(_packed_bytes(weight, weights), dtype)
    if weights is None:
        return pack_matrix(weight, room)
    packed = pack_quantised(weight, weights)
    return packed if room is None else room.copy_(packed.flatten())


def _packed_bytes(weight: torch.Tensor, weights: WeightFormat | None) -> int:
    outputs, inputs = weight.shape
    if weights is not None:
        return math.prod(packed_bytes(outputs, inputs, weights))
    return math.prod(packed_shape(outputs, inputs, weight.dtype)) * weight.element_size()


def _matrix(module: torch.nn.Module) -> torch.Tensor | None:
    """The weight [outputs, inputs] of a layer the kernels can stand in for; None for any other layer."""
    weight: Any = None
    if type(module) is torch.nn.Linear:
        weight = module.weight
    elif type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        weight = module.weight.T
    return weight if weight is not None and weight.dtype in _DTYPES else None

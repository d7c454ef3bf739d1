"""llama.cpp and OpenVINO GenAI on the target's GGUF file.

They compute with the file's own quantised weights, not in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopipe.bench.arms import Arm, ArmMissingError, ArmOutput
from autopipe.core.models.spec import SourceKind, resolve
from autopipe.core.plan import StagePlan
from autopipe.core.sampling import SamplingParams


class _GgufArm(Arm):
    """An arm that needs the target as a GGUF file."""

    draws_own_noise = True

    def __init__(self, target: StagePlan, threads: int) -> None:
        self._target = target
        self._threads = threads

    def _gguf(self) -> Path:
        if not self._target.is_emulated:
            source = resolve(self._target.model)
            if source.kind is SourceKind.DEFAULT:
                from autopipe.core.models.default_model import default_gguf

                return default_gguf()
            if source.kind is SourceKind.GGUF_FILE:
                return Path(source.location)
        raise ArmMissingError("needs the target as a GGUF file; give --target FILE.gguf")


class LlamaCppArm(_GgufArm):
    """llama.cpp through llama-cpp-python."""

    name = "llama.cpp"

    def prepare(self) -> None:
        try:
            import llama_cpp
        except ImportError:
            raise ArmMissingError("not installed; run: pip install llama-cpp-python") from None
        gguf = self._gguf()
        self._model: Any = llama_cpp.Llama(
            str(gguf), n_ctx=0, n_threads=self._threads, n_threads_batch=self._threads, verbose=False
        )

    def generate(self, ids: Sequence[int], sampling: SamplingParams) -> ArmOutput:
        tokens: list[int] = []
        self._model.reset()  # else it would keep the KV cache of a prompt it has seen, and skip its prefill
        self._model.set_seed(sampling.seed)
        stream = self._model.generate(
            list(ids),
            temp=sampling.temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repeat_penalty=1.0,
            reset=True,
        )
        for token in stream:
            tokens.append(int(token))
            if len(tokens) == sampling.max_new_tokens or token == self._model.token_eos():
                break
        stream.close()
        return ArmOutput(tuple(tokens), 1.0)

    def close(self) -> None:
        if hasattr(self, "_model"):
            self._model.close()


class OpenVinoArm(_GgufArm):
    """OpenVINO GenAI, which reads GGUF itself."""

    name = "openvino"

    def prepare(self) -> None:
        try:
            import openvino_genai
        except ImportError:
            raise ArmMissingError("not installed; run: pip install openvino-genai") from None
        gguf = self._gguf()
        self._genai: Any = openvino_genai
        try:
            self._pipeline: Any = openvino_genai.LLMPipeline(str(gguf), "CPU", INFERENCE_NUM_THREADS=self._threads)
        except RuntimeError as error:
            raise ArmMissingError(f"OpenVINO GenAI cannot load {gguf.name}: {error}") from None

    def generate(self, ids: Sequence[int], sampling: SamplingParams) -> ArmOutput:
        import numpy
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens = sampling.max_new_tokens
        config.do_sample = not sampling.greedy
        if not sampling.greedy:
            config.temperature, config.rng_seed = sampling.temperature, sampling.seed
        config.set_eos_token_id(self._pipeline.get_tokenizer().get_eos_token_id())
        output = self._pipeline.generate(openvino.Tensor(numpy.array([ids], dtype=numpy.int64)), config)
        return ArmOutput(tuple(int(token) for token in output.tokens[0]), 1.0)

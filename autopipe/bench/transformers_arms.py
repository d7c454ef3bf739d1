"""transformers' own `generate`, prompt lookup and assisted generation, on the same model and threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopipe.bench.arms import Arm, ArmMissingError, ArmOutput
from autopipe.core.plan import StagePlan
from autopipe.core.sampling import SamplingParams

LOOKUP_TOKENS = 10
"""`prompt_lookup_num_tokens`: the value transformers' documentation uses."""


class TransformersModels:
    """Models of the transformers arms, each loaded once into this process."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._models: dict[str, Any] = {}

    def load(self, stage: StagePlan) -> Any:
        """The stage's model as transformers' `AutoModelForCausalLM`, in the dtype AutoPipe chooses for it."""
        import torch
        import transformers

        from autopipe.core.models.loading import choose_dtype, local_folder
        from autopipe.core.models.spec import resolve

        self.set_threads()
        key = repr(stage.identity())
        if key not in self._models:
            transformers.utils.logging.set_verbosity_error()
            transformers.utils.logging.disable_progress_bar()
            source = resolve(stage.model)
            device = "cpu" if stage.device == "auto" and not torch.cuda.is_available() else stage.device
            device = "cuda" if device == "auto" else device
            model = transformers.AutoModelForCausalLM.from_pretrained(
                local_folder(source),
                dtype=choose_dtype(stage.dtype, source, device),
                trust_remote_code=stage.trust_remote_code,
            )
            if stage.adapter is not None:
                model.load_adapter(stage.adapter)
            self._models[key] = model.to(device).eval()
        return self._models[key]

    def set_threads(self) -> None:
        """Give torch in this process the threads of the bench, whatever other arms have set since."""
        import torch

        torch.set_num_threads(self._threads)

    def close(self) -> None:
        self._models.clear()


class TransformersArm(Arm):
    """`model.generate` as its users call it.

    Args:
        name: `transformers`, `transformers-lookup` or `transformers-assisted`.
        drafter: the assistant, for `transformers-assisted`.
    """

    draws_own_noise = True

    def __init__(
        self, name: str, target: StagePlan, models: TransformersModels, drafter: StagePlan | None = None
    ) -> None:
        self.name = name
        self._target = target
        self._drafter = drafter
        self._models = models
        self._options: dict[str, Any] = {}

    def prepare(self) -> None:
        if self.name == "transformers-assisted" and self._drafter is None:
            raise ArmMissingError("needs a drafter that is a model; add --drafter MODEL")
        if self._target.is_emulated:
            raise ArmMissingError("an emulated target has no transformers model")
        model = self._models.load(self._target)
        if self.name == "transformers-lookup":
            self._options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        elif self._drafter is not None and self.name == "transformers-assisted":
            self._options["assistant_model"] = self._models.load(self._drafter)
        self._model = model

    def generate(self, ids: Sequence[int], sampling: SamplingParams) -> ArmOutput:
        import torch

        self._models.set_threads()
        forwards = 0

        def count(*_: Any) -> None:
            nonlocal forwards
            forwards += 1

        options = dict(self._options)
        if not sampling.greedy:
            torch.manual_seed(sampling.seed)
            options |= {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        prompt = torch.tensor([list(ids)], device=self._model.device)  # [1, prompt]
        hook = self._model.register_forward_pre_hook(count)
        try:
            with torch.inference_mode():
                output = self._model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=sampling.max_new_tokens,
                    do_sample=not sampling.greedy,
                    pad_token_id=self._model.generation_config.eos_token_id,
                    **options,
                )
        finally:
            hook.remove()
        tokens = tuple(output[0, prompt.shape[1] :].tolist())
        return ArmOutput(tokens, len(tokens) / forwards if forwards else None)

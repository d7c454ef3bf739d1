"""The Python API over tiny real models in real worker processes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, StoppingCriteria

from autopipe import AutoPipe, ConfigError, Plan, StagePlan
from autopipe.core import kernels
from autopipe.core.errors import AutoPipeError, ContextLengthError, EngineClosedError, TokenizerMismatchError
from tests.tiny import VOCAB_SIZE, save_tiny, tiny_tokenizer

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder).eval()


def reference(model: Any, pipe: AutoPipe, length: int, **options: Any) -> list[int]:
    ids = torch.tensor([pipe.encode(PROMPT)])
    output = model.generate(ids, max_new_tokens=length, do_sample=False, pad_token_id=0, **options)
    return output[0, ids.shape[1] :].tolist()


def test_greedy_output_is_that_of_transformers_generate(pipe: AutoPipe, model: Any) -> None:
    result = pipe.generate(PROMPT, max_new_tokens=80)
    assert result.token_ids == reference(model, pipe, 80)
    assert result.text == pipe.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert result.stats.stages[0].name == "ngram"


def test_token_ids_and_tensors_are_taken_as_model_generate_takes_them(pipe: AutoPipe) -> None:
    ids = torch.tensor([pipe.encode(PROMPT)])
    expected = pipe.generate(PROMPT, max_new_tokens=10)
    assert pipe.generate(ids, max_new_tokens=10).sequences == expected.sequences
    assert pipe.generate(input_ids=ids[0].tolist(), max_new_tokens=10).token_ids == expected.token_ids


def test_a_list_of_messages_is_taken_for_a_chat(pipe: AutoPipe) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert pipe.generate(messages, max_new_tokens=3).prompt_ids == pipe.encode(messages=messages)


def test_deltas_join_to_the_text_and_the_last_has_the_result(pipe: AutoPipe) -> None:
    deltas = list(pipe.stream(PROMPT, max_new_tokens=40))
    last = deltas[-1].result
    assert last is not None
    assert "".join(delta.text for delta in deltas) == last.text
    assert [token for delta in deltas for token in delta.token_ids] == last.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_chat_messages_go_through_the_template(pipe: AutoPipe) -> None:
    ids = pipe.encode(messages=[{"role": "user", "content": "hi"}])
    assert pipe.tokenizer.decode(ids) == "user: hi\nassistant: "


def test_a_stop_string_cuts_text_tokens_usage_and_logprobs_alike(pipe: AutoPipe) -> None:
    full = pipe.generate(PROMPT, max_new_tokens=80)
    letters = full.text[20:22]
    result = pipe.generate(PROMPT, max_new_tokens=80, stop=[letters], num_logprobs=2)
    assert result.finish_reason == "stop"
    assert result.text == full.text[: full.text.index(letters)]
    assert result.token_ids == full.token_ids[: len(result.token_ids)]
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.token_ids)
    assert letters in pipe.tokenizer.decode(result.token_ids)
    assert letters not in pipe.tokenizer.decode(result.token_ids[:-1])


def test_logprobs_equal_those_of_plain_decoding_and_of_the_model(pipe: AutoPipe, model: Any) -> None:
    speculative = pipe.generate(PROMPT, max_new_tokens=40, num_logprobs=3)
    plan = pipe.plan
    pipe.apply(plan.replace(mode="plain"))
    plain = pipe.generate(PROMPT, max_new_tokens=40, num_logprobs=3)
    pipe.apply(plan)
    assert speculative.logprobs == plain.logprobs
    ids = torch.tensor([speculative.prompt_ids + speculative.token_ids])
    with torch.inference_mode():
        rows = model(ids).logits[0, len(speculative.prompt_ids) - 1 : -1].log_softmax(-1)
    assert speculative.logprobs is not None
    for row, item, token in zip(rows, speculative.logprobs, speculative.token_ids, strict=True):
        assert item["token_id"] == token
        assert item["logprob"] == pytest.approx(float(row[token]), abs=1e-3)
        assert len(item["top"]) == 3


def test_an_abandoned_iterator_leaves_the_pipeline_clean(pipe: AutoPipe) -> None:
    expected = pipe.generate(PROMPT, max_new_tokens=30).token_ids
    stream = pipe.stream(PROMPT, max_new_tokens=400)
    next(stream)
    stream.close()
    assert pipe.generate(PROMPT, max_new_tokens=30).token_ids == expected


class OnlyEven(LogitsProcessor):
    """Stateful on purpose: it would go wrong if shown a prefix twice, or out of order."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        scores = scores.clone()
        scores[:, 1::2] = -float("inf")
        return scores


def test_a_transformers_logits_processor_works_as_in_generate(pipe: AutoPipe, model: Any) -> None:
    processor = OnlyEven()
    result = pipe.generate(PROMPT, max_new_tokens=30, logits_processor=[processor])
    assert result.token_ids == reference(model, pipe, 30, logits_processor=[OnlyEven()])
    start = result.prompt_tokens
    assert processor.lengths == list(range(start, start + len(result.token_ids)))


class UpTo(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("extra", [1, 5, 6, 7, 8, 23])
def test_a_stopping_criterion_stops_at_the_very_token(pipe: AutoPipe, extra: int) -> None:
    full = pipe.generate(PROMPT, max_new_tokens=40)
    start = full.prompt_tokens
    result = pipe.generate(PROMPT, max_new_tokens=40, stopping_criteria=[UpTo(start + extra)])
    assert result.token_ids == full.token_ids[:extra]
    assert result.text == pipe.tokenizer.decode(result.token_ids)
    assert result.finish_reason == "stop"


class Recorder:
    """A streamer."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_the_prompt_then_every_token_then_the_end(pipe: AutoPipe) -> None:
    recorder = Recorder()
    result = pipe.generate(PROMPT, max_new_tokens=12, streamer=recorder)
    assert recorder.ids == result.sequences[0]
    assert recorder.ended


def test_a_streamer_that_was_given_the_prompt_hears_of_the_end_when_the_request_is_refused(
    pipe: AutoPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*_: Any, **__: Any) -> None:
        raise EngineClosedError("closed meanwhile")

    monkeypatch.setattr(pipe.engine, "submit", submit)
    recorder = Recorder()
    with pytest.raises(EngineClosedError):
        pipe.generate(PROMPT, streamer=recorder)
    assert recorder.ids
    assert recorder.ended


def test_the_output_of_a_tokenizer_is_taken_as_model_generate_takes_it(pipe: AutoPipe) -> None:
    inputs = pipe.tokenizer(PROMPT, return_tensors="pt")
    assert set(inputs) == {"input_ids", "attention_mask"}
    result = pipe.generate(**inputs, max_new_tokens=5, pad_token_id=pipe.tokenizer.pad_token_id)
    assert result.token_ids == pipe.generate(PROMPT, max_new_tokens=5).token_ids


def test_a_padded_prompt_is_refused(pipe: AutoPipe) -> None:
    inputs = pipe.tokenizer([PROMPT], return_tensors="pt", padding="max_length", max_length=40)
    with pytest.raises(ConfigError, match="padding") as caught:
        pipe.generate(**inputs)
    assert caught.value.key == "attention_mask"


@pytest.mark.parametrize(
    ("request_", "key"),
    [
        ({"prompt": "caf\udce9"}, "prompt"),
        ({"messages": [{"role": "user", "content": "caf\udce9"}]}, "messages"),
        ({"input_ids": [1.5]}, "input_ids"),
        ({"input_ids": [VOCAB_SIZE]}, "prompt"),
        ({"input_ids": []}, "prompt"),
        ({"prompt": "a", "trace": "."}, "trace"),
        ({"prompt": "a", "trace": "missing/trace.json"}, "trace"),
        ({"prompt": [1], "input_ids": [1]}, "prompt"),
        ({"prompt": "a", "min_new_tokens": 3, "max_new_tokens": 2}, "min_new_tokens"),
    ],
)
def test_a_bad_request_is_told_when_stream_is_called(pipe: AutoPipe, request_: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pipe.stream(**request_)
    assert caught.value.key == key


def test_a_context_too_short_is_told_when_stream_is_called(pipe: AutoPipe) -> None:
    with pytest.raises(ContextLengthError):
        pipe.stream(PROMPT, max_new_tokens=500)


def test_generate_takes_and_documents_the_arguments_of_stream() -> None:
    ours, theirs = inspect.signature(AutoPipe.generate), inspect.signature(AutoPipe.stream)
    assert list(ours.parameters) == list(theirs.parameters)
    assert ours.return_annotation == "GenerationResult"


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"temperatur": 1}, "temperatur"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"stop": [""]}, "stop"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
    ],
)
def test_bad_options_name_the_key(pipe: AutoPipe, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pipe.generate(PROMPT, **options)
    assert caught.value.key == key


def test_exactly_one_kind_of_prompt(pipe: AutoPipe) -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        pipe.generate()
    with pytest.raises(ConfigError, match="exactly one"):
        pipe.generate("a", messages=[{"role": "user", "content": "b"}])
    with pytest.raises(ConfigError, match="one row"):
        pipe.generate(input_ids=[[1], [2]])


def test_a_prompt_too_long_for_the_context_is_told_before_it_runs(pipe: AutoPipe) -> None:
    with pytest.raises(ContextLengthError, match="512"):
        pipe.generate(PROMPT, max_new_tokens=500)


def test_a_neural_chain_joins_and_leaves_while_it_runs(pipe: AutoPipe, tiny_folder: Path) -> None:
    before = pipe.plan
    expected = pipe.generate(PROMPT, max_new_tokens=200).token_ids
    target = before.target.model_dump()
    drafter = StagePlan(model=str(tiny_folder), name="copy", window=3).model_dump()
    chain = Plan.parse({"chain": [drafter, target], "mode": "async"})
    token_ids: list[int] = []
    for number, delta in enumerate(pipe.stream(PROMPT, max_new_tokens=200)):
        token_ids += delta.token_ids
        if number == 2:
            pipe.apply(chain)
        if delta.result is not None:
            stages = delta.result.stats.stages
    assert token_ids == expected
    result = pipe.generate(PROMPT, max_new_tokens=60)
    assert result.token_ids == expected[:60]
    assert result.stats.stages[0].name == "copy"
    assert result.stats.stages[0].acceptance_rate == 1.0
    pipe.apply(before)
    assert stages


def test_applying_a_plan_with_another_target_is_refused(pipe: AutoPipe, tiny_bf16_folder: Path) -> None:
    with pytest.raises(ConfigError, match="plans with this target"):
        pipe.apply(Plan.parse({"chain": [{"model": str(tiny_bf16_folder)}]}))


@pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")
def test_the_target_may_draft_for_itself_with_fewer_bits(tiny_folder: Path) -> None:
    with AutoPipe.from_pretrained(str(tiny_folder), drafters=["int8"], dtype="fp32", threads=1) as pipe:
        drafted = pipe.generate("one two three", max_new_tokens=24)
        pipe.apply(pipe.plan.replace(mode="plain"))
        plain = pipe.generate("one two three", max_new_tokens=24)
    assert pipe.plan.chain[0].dtype == "int8"
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.acceptance_length > 1


def test_but_not_with_as_many(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="drafters: 'int8'"):
        AutoPipe.from_pretrained(str(tiny_folder), drafters=["int8"], dtype="int8")


def test_another_tokenizer_is_refused_before_weights_load(tiny_folder: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other")
    tiny_tokenizer(extra_tokens=("<new>",)).save_pretrained(other)
    with pytest.raises(TokenizerMismatchError, match="other"):
        AutoPipe.from_pretrained(str(tiny_folder), drafters=[str(other)])


def test_bad_plans_fail_before_weights_load() -> None:
    for fields in ({"target": "/no/such/folder"}, {"target": "smollm2-135m", "dtype": "int3"}):
        with pytest.raises(AutoPipeError):
            AutoPipe.from_pretrained(**fields)


def test_emulated_chains_run_through_the_same_api() -> None:
    stage = {"model": "emulated", "emulated": {"ms": {1: 1}}}
    plan = Plan.parse({"chain": [{**stage, "name": "a"}, {**stage, "name": "b"}], "mode": "async"})
    with AutoPipe.from_plan(plan) as pipe:
        assert len(pipe.generate("hello", max_new_tokens=9).token_ids) == 9

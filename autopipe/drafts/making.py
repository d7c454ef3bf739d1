"""`autopipe drafts answers`, as a function: the target, the prompts and the folder put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from autopipe.core.errors import ConfigError
from autopipe.core.plan import FEWER_BITS, BackendName, StagePlan
from autopipe.drafts.answers import AnswerGenerator, Progress
from autopipe.drafts.mix import SHARES, PromptMix, file_source, own_sources
from autopipe.drafts.overlap import OverlapFilter
from autopipe.drafts.store import AnswerStore, read_meta

if TYPE_CHECKING:
    from autopipe.drafts.batch import BatchForward

MAX_SLOTS = 64


def make_answers(
    target: StagePlan,
    out: str | Path,
    num_tokens: int,
    *,
    prompts: str | Path | None = None,
    max_new_tokens: int = 200,
    slots: int = 32,
    threads: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Fill a folder with answers of the target, going on where an earlier run stopped.

    Args:
        target: the model whose answers are wanted.
        out: the folder; made, or gone on with.
        num_tokens: answer tokens there shall be in all.
        prompts: a file of JSON lines instead of self-made prompts.
        max_new_tokens: longest answer.
        slots: sequences computed at a time, 1 to 64.
        threads: compute threads; None: all cores.
        seed: of everything sampled.
        say: told when something slow begins.
        report: called after every step.

    Raises:
        ConfigError: a bad argument, before the target loads.
        ModelLoadError, UnsupportedModelError: the target cannot be loaded.
    """
    for key, value, least, most in (
        ("--tokens", num_tokens, 1, 1 << 40),
        ("--max-new-tokens", max_new_tokens, 2, 1 << 20),
        ("--batch", slots, 1, MAX_SLOTS),
    ):
        if not least <= value <= most:
            raise ConfigError(key, value, f"{least} to {most}" if most < 1 << 20 else f"{least} or more")
    import torch

    from autopipe.core.backends.load import check_stage
    from autopipe.core.models import load_tokenizer, resolve, tokenizer_fingerprint

    if target.is_ngram or target.is_emulated:
        raise ConfigError("--target", target.model, "a model with weights and a tokenizer")
    info = check_stage(target, "--target", progress=say)
    tokenizer = load_tokenizer(resolve(target.model, "--target"), trust_remote_code=target.trust_remote_code)
    header = {
        "target": target.model,
        "dtype": info.dtype,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "vocab_size": info.vocab_size,
    }
    if target.adapter is not None:
        header["adapter"] = target.adapter
    store = AnswerStore(out, header)
    with _only_run(out):
        before = list(read_meta(out))
        tokens = Counter[str]()
        for meta in before:
            tokens[meta["kind"]] += meta["num_tokens"]
        done = {meta["key"].rpartition("/")[0] for meta in before}
        say("collecting prompts")
        if prompts is not None:
            path = Path(prompts)
            mix = PromptMix({path.stem: file_source(path, done)}, {path.stem: 1.0}, tokens)
        else:
            mix = PromptMix(own_sources(tokenizer, done), SHARES, tokens)
        say(f"loading {target.model}")
        batch = load_batch(target, slots, threads)
        torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # beside the kernels' own threads more only spin: ten times the CPU time for a top 64
        try:
            generator = AnswerGenerator(
                batch,
                tokenizer,
                info.eos_token_ids,
                store,
                mix,
                OverlapFilter.of_benchmarks(),
                seen={meta["digest"] for meta in before},
                max_new_tokens=max_new_tokens,
                seed=seed,
            )
            generator.progress.num_tokens = sum(tokens.values())
            generator.progress.num_answers = len(before)
            generator.run(num_tokens, report)
        finally:
            torch.set_num_threads(torch_threads)
            batch.close()
        return generator.progress


@contextmanager
def _only_run(folder: str | Path) -> Iterator[None]:
    """Two runs would put their shards in each other's place."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(Path(folder) / ".lock", timeout=0):
            yield
    except Timeout:
        raise ConfigError("--out", str(folder), "a folder that no other run is filling") from None


def load_batch(target: StagePlan, slots: int, threads: int | None) -> BatchForward:
    """The target for several sequences at a time, or one at a time where its backend cannot batch."""
    from autopipe.core.backends.load import check_stage, load_backend
    from autopipe.drafts.batch import OneSequence

    quantised = target.dtype in FEWER_BITS  # batched weights are in 16 or 32 bits
    if quantised or check_stage(target).backend is not BackendName.FUSED:
        return OneSequence(load_backend(target, threads=threads))
    from autopipe.core.backends.fused_batch import batch_runner
    from autopipe.core.models import choose_dtype, load_config, load_state, resolve

    source = resolve(target.model)
    dtype = choose_dtype(target.dtype, source)
    config = load_config(source, trust_remote_code=target.trust_remote_code)
    state = load_state(source, dtype, adapter=target.adapter)
    device = "cpu" if target.device == "auto" else target.device
    return batch_runner(config, state, dtype=dtype, device=device, threads=threads, slots=slots)

"""A tiny target with answers of its own, for the tests of distillation."""

from __future__ import annotations

from pathlib import Path

import torch

from autopipe.core.models import tokenizer_fingerprint
from autopipe.core.models.shared_base import DrafterInfo, save_drafter_info, weights_fingerprint
from autopipe.drafts.distill_student import Student
from autopipe.drafts.store import AnswerStore
from tests.tiny import EOS_ID, VOCAB_SIZE, save_tiny, tiny_model, tiny_state, tiny_tokenizer

KINDS = ("chat", "code")


def tiny_target(folder: Path, kind: str = "llama") -> Path:
    """A folder with a four-layer target."""
    return save_tiny(folder, kind, num_hidden_layers=4)


@torch.no_grad()
def tiny_answers(folder: Path, kind: str = "llama", *, num_answers: int = 24, length: int = 24) -> Path:
    """Greedy answers of `tiny_target` to random prompts, every fourth held out."""
    model = tiny_model(kind, num_hidden_layers=4)
    header = {"target": "tiny", "tokenizer": tokenizer_fingerprint(tiny_tokenizer()), "vocab_size": VOCAB_SIZE}
    store = AnswerStore(folder, header, shard_tokens=200)
    draw = torch.Generator().manual_seed(0)
    for index in range(num_answers):
        prompt = torch.randint(0, 256, (3 + index % 5,), generator=draw).tolist()
        ids = list(prompt)
        while len(ids) < len(prompt) + length and ids[-1] != EOS_ID:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        logprobs = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        top = logprobs.topk(64)
        meta = {
            "key": f"{index}",
            "kind": KINDS[index // 4 % 2],
            "split": "heldout" if index % 4 == 3 else "train",
            "sampling": "greedy",
        }
        store.add(meta, ids, len(prompt), top.indices.numpy(), top.values.numpy())
    store.flush()
    return folder


def tiny_drafter(
    folder: Path, kind: str = "llama", *, layers: tuple[int, ...] = (0, 1, 3), head: int = 200, seed: int = 0
) -> Path:
    """An untrained drafter of `tiny_target`: its adapters are random, and small."""
    model = tiny_model(kind, num_hidden_layers=4)
    state = tiny_state(model)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randperm(256, generator=draw)[: head - 1]
    head_ids = torch.cat((ids, torch.tensor([EOS_ID]))).sort().values
    student = Student(
        model.config, state, layers=layers, head_ids=head_ids, rank=4, alpha=8.0, seed=seed, base_name="tiny"
    )
    with torch.no_grad():
        for _, parameter in student.named_parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=draw)
    folder.mkdir(parents=True, exist_ok=True)
    student.save(folder)
    fingerprints = weights_fingerprint(state), tokenizer_fingerprint(tiny_tokenizer())
    info = DrafterInfo("tiny", *fingerprints, layers, VOCAB_SIZE, len(head_ids))
    save_drafter_info(folder, info, head_ids.int(), {})
    return folder

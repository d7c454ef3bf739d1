"""The training forward computes what PEFT's own model computes, and so do its gradients."""

from __future__ import annotations

import pytest
import torch

from autopipe.drafts.distill_loss import head_loss
from autopipe.drafts.distill_student import Student
from tests.tiny import tiny_model, tiny_state

LAYERS = (0, 1, 3)
HEAD_IDS = torch.arange(0, 256, 2)
LENGTHS = (5, 9)


def _student(kind: str = "llama", **options: object) -> Student:
    model = tiny_model(kind, num_hidden_layers=4)
    student = Student(model.config, tiny_state(model), layers=LAYERS, head_ids=HEAD_IDS, rank=4, alpha=8.0, **options)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(student.named_parameters()):
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    return student


def _ids() -> torch.Tensor:
    return torch.randint(0, 256, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("train_head", [True, False])
def test_logits_are_those_of_pefts_model_for_each_sequence_alone(kind: str, train_head: bool) -> None:
    student, ids = _student(kind, train_head=train_head), _ids()
    weights = student.step_weights()
    logits = weights.hidden(ids, LENGTHS, torch.arange(len(ids))) @ weights.head.t()
    expected = torch.cat([student.peft(part[None]).logits[0] for part in ids.split(list(LENGTHS))])
    assert torch.allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("train_head", [True, False])
def test_gradients_are_those_of_autograd_through_pefts_model(train_head: bool) -> None:
    student, ids = _student(train_head=train_head), _ids()
    rows = torch.tensor([1, 2, 6, 13])
    columns = torch.tensor([[3, 5], [7, 0], [100, 2], [5, 9]])
    probs = torch.tensor([[0.75, 0.25], [1.0, 0.0], [0.5, 0.5], [0.9, 0.1]])
    weight = torch.tensor([1.0, 0.5, 1.0, 0.0])

    steps = student.step_weights()
    head_loss(steps.hidden(ids, LENGTHS, rows), steps.head, columns, probs, weight).backward()
    steps.backward(2.5)
    fast = {name: parameter.grad.clone() for name, parameter in student.named_parameters()}

    student.peft.zero_grad(set_to_none=True)
    logits = torch.cat([student.peft(part[None]).logits[0] for part in ids.split(list(LENGTHS))])[rows]
    expected = (logits.log_softmax(-1).gather(1, columns) * probs).sum(-1)
    (-(expected * weight).sum() / 2.5).backward()
    for name, parameter in student.named_parameters():
        assert torch.allclose(fast[name], parameter.grad, rtol=1e-3, atol=1e-4), name


def test_only_adapters_norms_and_the_head_are_trained() -> None:
    student = _student()
    parameters = student.parameters()
    matrices = 7 * len(LAYERS)
    assert (len(parameters.down), len(parameters.up)) == (matrices, matrices)
    assert [tuple(head.shape) for head in parameters.head] == [(len(HEAD_IDS), 64)]
    assert len(parameters.norms) == 2 * len(LAYERS) + 1
    every = [*parameters.down, *parameters.up, *parameters.head, *parameters.norms]
    assert {id(p) for p in every} == {id(p) for _, p in student.named_parameters()}


def test_a_sequence_does_not_attend_to_the_one_before_it() -> None:
    student, ids = _student(), _ids()
    weights, changed = student.step_weights(), ids.clone()
    changed[: LENGTHS[0]] = 7
    rows = torch.arange(LENGTHS[0], len(ids))
    assert torch.equal(weights.hidden(ids, LENGTHS, rows), weights.hidden(changed, LENGTHS, rows))

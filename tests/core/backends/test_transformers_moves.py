"""Layers that move: what is computed stays the same, and only keys and values that are not there yet travel.

Where a second device is needed the meta device stands in for it: it holds shapes and no numbers.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.core.backends.transformers import TransformersBackend
from autopipe.core.backends.transformers_cache import RollbackLayer, Step
from autopipe.core.backends.transformers_moves import Moved, attention_devices, move_layers
from autopipe.core.engine import Engine
from autopipe.core.errors import ConfigError, UnsupportedModelError
from autopipe.core.plan import Plan, StagePlan
from autopipe.core.sampling import SamplingParams
from autopipe.core.stage_server import StageServer
from tests.tiny import tiny_model

CPU, META = torch.device("cpu"), torch.device("meta")
HEADS, SIZE = 2, 4
PER_POSITION = 2 * HEADS * SIZE * 4
PARTS = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head")


def append(layer: RollbackLayer, step: Step, count: int) -> None:
    """The next `count` positions, where the layer is; position p holds p + 1."""
    start = layer.num_stored
    step.start = step.keep_from = start
    step.keep_to = step.num_keys = start + count
    rows = torch.arange(start + 1.0, start + count + 1.0)[None, None, :, None].expand(1, HEADS, count, SIZE)
    place = CPU if layer.keys is None else layer.keys.device
    layer.update(rows.to(place), -rows.to(place))


def stored(layer: RollbackLayer) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.keys[0, 0, :, 0], layer.values[0, 0, :, 0]


def test_a_layer_that_comes_back_finds_what_it_left() -> None:
    step = Step()
    layer = RollbackLayer(step)
    append(layer, step, 10)
    assert layer.place(META) == (10 * PER_POSITION, 10 * PER_POSITION)
    assert layer.place(CPU) == (0, 10 * PER_POSITION)
    keys, values = stored(layer)
    assert keys[:10].tolist() == list(range(1, 11))
    assert values[:10].tolist() == [-key for key in range(1, 11)]
    assert layer.place(CPU) == (0, 0)


def test_what_was_rolled_back_elsewhere_is_gone_here_too() -> None:
    step = Step()
    layer = RollbackLayer(step)
    append(layer, step, 10)
    layer.place(META)
    layer.forget_from(6)
    assert layer.place(CPU) == (0, 6 * PER_POSITION)
    assert stored(layer)[0][:10].tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["append", "roll", "move"]), st.integers(1, 7)), max_size=30))
def test_exactly_the_positions_that_a_device_lacks_travel_to_it(steps: list[tuple[str, int]]) -> None:
    """The CPU under several names, against what each device holds: for every position, when it was computed."""
    step = Step()
    layer = RollbackLayer(step)
    append(layer, step, 3)
    places = [CPU, torch.device("cpu:0"), torch.device("cpu:1")]
    serial = itertools.count()
    here = CPU
    held = {CPU: [next(serial) for _ in range(3)]}
    for action, amount in steps:
        if action == "append":
            append(layer, step, amount)
            held[here] += [next(serial) for _ in range(amount)]
        elif action == "roll":
            length = max(0, layer.num_stored - amount)
            layer.forget_from(length)
            held = {place: computed[:length] for place, computed in held.items()}
        elif places[amount % 3] != here:
            there = held.get(places[amount % 3], [])
            missing = [new for new, old in itertools.zip_longest(held[here], there) if new != old]
            assert layer.place(places[amount % 3]) == (len(missing) * PER_POSITION, layer.num_stored * PER_POSITION)
            here, held[places[amount % 3]] = places[amount % 3], held[here].copy()
        keys = stored(layer)[0]
        assert keys[: layer.num_stored].tolist() == list(range(1, layer.num_stored + 1))
        assert not keys[layer.num_stored :].any()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_computing_goes_on_where_it_was_after_a_move(kind: str) -> None:
    backend, still = (TransformersBackend(tiny_model(kind), kernels=False) for _ in range(2))
    ids = random.Random(1).choices(range(100), k=40)
    for each in (backend, still):
        each.prefill(ids[:30])
    moved = backend.place(dict.fromkeys([name for name, _ in backend.model.named_modules() if name], "cpu"))
    assert (moved.weight_bytes, moved.kv_bytes) == (0, 0)
    assert torch.equal(backend.forward(ids[30:]), still.forward(ids[30:]))
    backend.place({"": "cpu"})
    backend.rollback(20)
    still.rollback(20)
    assert torch.equal(backend.forward(ids[20:]), still.forward(ids[20:]))


def test_a_cache_follows_its_layers() -> None:
    model = tiny_model()
    step = Step()
    layers = [RollbackLayer(step) for _ in range(2)]
    for layer in layers:
        append(layer, step, 5)
        layer.place(META)
        step.start = step.keep_from = step.keep_to = 0
    moved = move_layers(model, layers, {"": "cpu"})
    assert attention_devices(model) == [CPU, CPU]
    assert [layer.keys.device for layer in layers] == [CPU, CPU]
    assert (moved.kv_bytes, moved.kv_resend_bytes) == (0, 2 * 5 * PER_POSITION)


@pytest.mark.parametrize(
    "device_map", [{"model.layers.0": "cpu"}, dict.fromkeys(PARTS, "cuda:77"), dict.fromkeys(PARTS, "nowhere")]
)
def test_a_map_that_cannot_be_followed_is_refused_and_the_one_before_still_can(device_map: dict[str, str]) -> None:
    backend, still = (TransformersBackend(tiny_model(), kernels=False) for _ in range(2))
    for each in (backend, still):
        each.prefill([1, 2, 3])
    with pytest.raises(ConfigError) as caught:
        backend.place(device_map)
    assert caught.value.key == "device_map"
    backend.place({"": "cpu"})
    assert torch.equal(backend.forward([4, 5]), still.forward([4, 5]))


def test_layers_on_our_kernels_stay_on_the_cpu() -> None:
    backend = TransformersBackend(tiny_model())
    with pytest.raises(UnsupportedModelError, match="native kernels"):
        backend.place({"": "cuda:0"})
    backend.place({"": "cpu"})


@pytest.mark.parametrize(
    ("device_map", "movable"),
    [
        ({"": "cpu"}, True),
        ({"model.layers.0": 0, "model.layers.1": "cuda:1"}, True),
        ({"model.layers.0": 0, "model.layers.1": "cpu"}, False),
        ({"": "disk"}, False),
        ("auto", False),
        (None, False),
    ],
)
def test_what_accelerate_keeps_in_memory_cannot_move(device_map: Any, movable: bool) -> None:
    assert StagePlan(model="m", device_map=device_map).movable is movable


def test_a_plan_that_only_moves_layers_loads_nothing_and_changes_no_token(tiny_folder: Path) -> None:
    def plan(drafter_map: dict[str, str]) -> Plan:
        stage = {"model": str(tiny_folder), "backend": "transformers"}
        drafter = {**stage, "name": "drafter", "device_map": drafter_map, "window": 3}
        return Plan.parse({"chain": [drafter, {**stage, "name": "target"}], "mode": "lockstep"})

    def generate(changes: bool) -> tuple[list[int], list[str]]:
        handle = engine.submit([5, 6, 7], SamplingParams(max_new_tokens=60))
        tokens: list[int] = []
        for block in handle:
            tokens += block.token_ids
            if changes and len(tokens) == len(block.token_ids):
                engine.apply(plan(dict.fromkeys(PARTS, "cpu")))
        return tokens, handle.outcome().stats.fallbacks

    with Engine(plan({"": "cpu"})) as engine:
        expected, _ = generate(changes=False)
        workers = dict(engine.worker_ids)
        tokens, fallbacks = generate(changes=True)
        assert (tokens, fallbacks, dict(engine.worker_ids)) == (expected, [], workers)
        engine.apply(plan(dict.fromkeys(PARTS, "cuda:77")))
        tokens, fallbacks = generate(changes=False)
        assert (tokens, dict(engine.worker_ids)) == (expected, workers)
        assert any("layers are not moved" in text for text in [*fallbacks, *engine.fallbacks])


class Elsewhere(TransformersBackend):
    """Refuses to go to one device, half way."""

    def __init__(self) -> None:
        self.name, self.device_map, self.asked = "m", {"": "cpu"}, list[Any]()

    def place(self, device_map: Any) -> Moved:
        self.asked.append(device_map)
        if device_map != self.device_map:
            raise ConfigError("device_map", device_map, "another")
        return Moved()


def test_layers_that_cannot_move_are_put_back_and_the_engine_is_told() -> None:
    server = StageServer.__new__(StageServer)
    backend, notes = Elsewhere(), list[str]()
    server._backend, server._note = backend, notes.append  # type: ignore[method-assign]  # instead of telling an engine
    server._stage = SimpleNamespace(count_moved=lambda moved: None)  # type: ignore[assignment]  # all that is asked of it
    server._move({"": "cuda:1"})
    assert backend.asked == [{"": "cuda:1"}, {"": "cpu"}]
    assert len(notes) == 1

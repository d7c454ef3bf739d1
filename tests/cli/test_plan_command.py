"""`autopipe plan --dry-run`: placement and predicted speed of hardware and models that are not there."""

import json

import pytest
import yaml

from autopipe.cli.plan_forecast import PlanRequest, make_forecast
from autopipe.core.errors import ConfigError, PlacementError
from autopipe.core.plan import Plan
from tests.profile.samples import sample_profile

PAPER = ("--hardware", "pipespec-4xA100", "--target", "llama-3.1-70b", "--target-dtype", "int4",
         "--drafter", "llama-3.2-1b", "--drafter", "llama-3.1-8b")  # fmt: skip


@pytest.fixture(scope="module")
def paper():
    request = PlanRequest(
        hardware="pipespec-4xA100",
        target="meta-llama/Meta-Llama-3.1-70B-Instruct",
        target_dtype="int4",
        drafters=("llama-3.2-1b", "llama-3.1-8b"),
    )
    return make_forecast(request, check_models=False)


def fastest(result, mode, num_stages):
    return min(each.ms_per_token for each in result.predictions if each.mode == mode and len(each.stages) == num_stages)


def test_the_papers_chain_is_ranked_as_measured(paper):
    three, two = fastest(paper, "async", 3), fastest(paper, "async", 2)
    synchronous = min(fastest(paper, "lockstep", 3), fastest(paper, "lockstep", 2))
    assert three < two < synchronous < fastest(paper, "plain", 1)


def test_the_target_may_draft_for_itself_in_fewer_bits():
    request = PlanRequest(hardware="2x4090", target="qwen2.5-7b", drafters=("int4",), drafter_dtype="bf16")
    found = make_forecast(request, check_models=False).placement.stages

    weights = {stage.name: sum(use.weights for use in stage.memory(4096).values()) for stage in found}
    assert list(weights) == ["qwen2.5-7b-int4", "qwen2.5-7b"]
    assert weights["qwen2.5-7b-int4"] < 0.5 * weights["qwen2.5-7b"]


def test_the_papers_speedup_is_predicted(paper):
    best = paper.predictions[0]
    assert best.speedup_over_plain == pytest.approx(2.54, rel=0.05)
    assert best.estimated is False


def test_the_papers_chain_is_placed_as_its_power_readings_say(paper):
    """Published runs: the 70B drew power on two GPUs, the smaller models on one each, another one."""
    devices = {stage.name: [part.device.name for part in stage.parts] for stage in paper.placement.stages}
    assert {name: len(names) for name, names in devices.items()} == {
        "llama-3.2-1b": 1,
        "llama-3.1-8b": 1,
        "Meta-Llama-3.1-70B-Instruct": 2,
    }
    assert len({name for names in devices.values() for name in names}) == 4


def test_the_fastest_plan_can_be_written_and_read(paper):
    plan = Plan.parse(yaml.safe_load(paper.best_plan().to_yaml()))
    assert plan.mode == "async"
    assert plan.target.device_map is not None
    assert plan.target.dtype == "int4"


def test_a_plan_that_could_not_start_as_exact_is_not_written_as_exact(paper):
    assert paper.best_plan().exact is False
    assert any("exact: false" in note for note in paper.notes)


def test_other_plans_stay_exact():
    request = PlanRequest(hardware="1xH100", target="llama-3.1-8b", drafters=("llama-3.2-1b",), output_tokens=200)
    result = make_forecast(request, check_models=False)
    assert result.best_plan().exact is True
    assert not any("exact" in note for note in result.notes)


def test_what_is_estimated_is_marked_and_assumed_agreement_is_noted():
    request = PlanRequest(hardware="1xH100", target="llama-3.1-8b", drafters=("llama-3.2-1b",), output_tokens=200)
    result = make_forecast(request, check_models=False)
    assert all(each.estimated for each in result.predictions)
    assert any("0.7 is assumed" in note for note in result.notes)


def test_a_given_agreement_is_used():
    def speed(rate):
        request = PlanRequest(
            hardware="2xH100", target="llama-3.1-8b", drafters=("llama-3.2-1b",), agreement=(rate,), output_tokens=300
        )
        return make_forecast(request, check_models=False).predictions[0].tokens_per_s

    assert speed(0.95) > 1.3 * speed(0.3)


def test_a_profile_beside_other_hardware_is_said_to_be_of_its_own_machine(tmp_path):
    (tmp_path / "p.json").write_text(sample_profile().model_dump_json())
    request = PlanRequest(
        hardware="1xH100", target="llama-3.1-8b", profile=tmp_path / "p.json", output_tokens=100, rebalance=False
    )
    assert any("p.json are those of the machine" in n for n in make_forecast(request, check_models=False).notes)


def test_layers_leave_a_shared_device_where_that_is_predicted_faster():
    request = PlanRequest(
        hardware="2x4090", target="qwen2.5-32b", target_dtype="int4", drafters=("qwen2.5-0.5b",), output_tokens=300
    )
    balanced = make_forecast(request, check_models=False)
    assert any("moved" in note for note in balanced.placement.notes)


def test_what_does_not_fit_is_explained():
    with pytest.raises(PlacementError, match=r"needs 143\.\d GB"):
        make_forecast(PlanRequest(hardware="2x4090", target="llama-3.1-70b"), check_models=False)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"agreement": (0.5, 0.5)}, "--agreement"),
        ({"agreement": (1.5,)}, "--agreement"),
        ({"context": 0}, "--context"),
        ({"share": 0.0}, "--memory-share"),
        ({"target_dtype": "int3"}, "--target-dtype"),
        ({"target": "gpt-9"}, "--target"),
        ({"hardware": "3xFoo"}, "--hardware"),
    ],
)
def test_a_bad_option_is_named(keys, named):
    request = {"hardware": "1xH100", "target": "llama-3.1-8b", "drafters": ("llama-3.2-1b",), **keys}
    with pytest.raises(ConfigError) as caught:
        make_forecast(PlanRequest(**request), check_models=False)
    assert caught.value.key.startswith(named)


def test_a_models_own_context_bounds_the_caches():
    request = PlanRequest(hardware="1xH100", target="smollm2-1.7b", context=100_000)
    result = make_forecast(request, check_models=False)
    assert result.placement.context == 8192
    assert any("8192" in note for note in result.notes)


def test_the_command_prints_json(invoke):
    result = invoke("plan", "--dry-run", *PAPER, "--output-tokens", "300", "--json")
    data = json.loads(result.stdout)
    assert [stage["name"] for stage in data["stages"]] == ["llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b"]
    assert data["predictions"][0]["mode"] == "async"


def test_the_command_prints_tables(invoke):
    result = invoke("plan", "--dry-run", "--hardware", "1xH100", "--target", "llama-3.1-8b")
    assert "cuda:0" in result.stdout
    assert "estimated" in result.stdout


def test_a_folder_is_no_place_for_the_plan(invoke, tmp_path):
    result = invoke("plan", "--dry-run", "--hardware", "1xH100", "--target", "llama-3.1-8b", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "--out" in result.stderr


def test_hardware_without_dry_run_is_refused(invoke):
    result = invoke("plan", "--hardware", "8xH100")
    assert result.exit_code != 0
    assert "--dry-run" in result.stderr

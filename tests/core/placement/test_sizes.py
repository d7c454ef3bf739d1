"""Sizes of models from names and from config.json."""

import json

import pytest

from autopipe.core.errors import ConfigError, ModelLoadError
from autopipe.core.placement import PUBLISHED, sizes_from_config, sizes_of


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.2-1b", 1.236), ("llama-3.1-8b", 8.030), ("llama-3.1-70b", 70.55), ("llama-3.1-405b", 405.9),
     ("qwen2.5-72b", 72.7), ("qwen3-0.6b", 0.596), ("smollm2-135m", 0.1345)],
)  # fmt: skip
def test_parameters_are_those_the_authors_published(name, billions):
    assert sizes_of(name).num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("spelling", ["meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b", "Llama-3.1-8B"])
def test_a_hub_id_means_the_model_of_the_table(spelling):
    assert sizes_of(spelling).name == "llama-3.1-8b"


def test_sizes_of_a_folder_come_from_its_config(tmp_path):
    config = {
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = sizes_of(str(tmp_path))
    assert (sizes.head_dim, sizes.num_layers, sizes.tied, sizes.qkv_bias) == (16, 3, True, True)


def test_the_table_counts_the_same_parameters_as_transformers():
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    for kind in ("llama", "qwen2"):
        config = AutoConfig.for_model(
            kind, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=100, tie_word_embeddings=False,
        )  # fmt: skip
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert sizes_from_config(config.to_dict(), kind).num_parameters == model.num_parameters()


def test_an_unknown_name_lists_what_is_known():
    with pytest.raises(ConfigError, match=r"--target: 'gpt-9'.*llama-3.1-8b"):
        sizes_of("gpt-9", "--target")


def test_another_kind_of_model_is_refused_by_name():
    with pytest.raises(ModelLoadError, match="'t5'"):
        sizes_from_config({"model_type": "t5"}, "mine")


def test_every_published_shape_has_whole_groups_of_heads():
    for row in PUBLISHED.values():
        assert row["num_heads"] % row["num_kv_heads"] == 0

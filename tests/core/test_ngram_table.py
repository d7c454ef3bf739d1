"""The learned n-gram table: counting, pruning, the file."""

import json
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from autopipe.core.errors import ConfigError, ModelLoadError
from autopipe.core.ngram import NgramDrafter
from autopipe.core.ngram_counting import as_table, entry_bytes
from autopipe.core.ngram_table import FORMAT, NgramTable
from autopipe.core.plan import NgramOptions

SEQUENCES = st.lists(st.lists(st.integers(0, 3), max_size=25), max_size=4)


def counted(sequences, order):
    """Successor counts of each context of `order` tokens, by brute force."""
    counts = defaultdict(Counter)
    for sequence in sequences:
        for i in range(order, len(sequence)):
            counts[tuple(sequence[i - order : i])][sequence[i]] += 1
    return counts


@settings(deadline=None)
@given(sequences=SEQUENCES, min_count=st.integers(1, 3))
def test_an_unpruned_table_holds_what_was_counted(sequences, min_count):
    table = NgramTable.build(sequences, max_order=3, min_count=min_count)
    expected = 0
    for order in (1, 2, 3):
        for context, successors in counted(sequences, order).items():
            total, best = sum(successors.values()), max(successors.values())
            if total < min_count:
                continue
            expected += 1
            match = table.match(context)
            assert match.order == order
            assert successors[match.token_id] == best
            assert match.occurrences == total
            assert match.share == round(255 * best / total)
    assert len(table) == expected


def test_the_longest_known_context_counts():
    table = NgramTable.build([[1, 2, 3], [1, 2, 3], [2, 4], [2, 4], [2, 4]])
    assert table.match([9, 2]).token_id == 4
    assert (table.match([9, 1, 2]).token_id, table.match([9, 1, 2]).order) == (3, 2)
    assert table.match([7]) is None
    assert table.match([]) is None


def test_no_context_reaches_into_the_next_sequence():
    assert NgramTable.build([[1], [2], [1], [2]], min_count=1).match([1]) is None


def test_a_budget_keeps_the_contexts_that_say_most():
    redundant = [[0, 5, 6]] * 20 + [[1, 5, 6]] * 20 + [[2, 5, 7]] * 10
    table = NgramTable.build(redundant, max_order=2, max_bytes=4 * entry_bytes(7))
    assert len(table) == 4
    assert table.match([2, 5]).token_id == 7
    assert table.match([5]).token_id == 6


def test_counts_saturate():
    match = NgramTable.build([[1, 2]] * 1000).match([1])
    assert (match.occurrences, match.share) == (255, 255)


def test_a_saved_table_loads_unchanged(tmp_path):
    table = NgramTable.build([[1, 2, 3, 4] * 9], metadata={"licence": "Apache-2.0"})
    table.save(tmp_path / "table.safetensors")
    loaded = NgramTable.load(tmp_path / "table.safetensors")
    assert len(loaded) == len(table) > 0
    assert loaded.metadata["licence"] == "Apache-2.0"
    assert loaded.max_order == table.max_order
    for context in ([1], [1, 2], [4, 1, 2, 3], [3, 1], [9]):
        assert loaded.match(context) == table.match(context)


def test_an_empty_table_saves_and_loads(tmp_path):
    NgramTable.build([]).save(tmp_path / "table.safetensors")
    loaded = NgramTable.load(tmp_path / "table.safetensors")
    assert (len(loaded), loaded.max_token_id, loaded.match([1])) == (0, -1, None)


@pytest.mark.parametrize(("token_id", "dtype", "size"), [(65_535, np.uint16, 8), (65_536, np.uint32, 10)])
def test_token_ids_take_the_room_they_need(tmp_path, token_id, dtype, size):
    NgramTable.build([[1, token_id]], min_count=1).save(tmp_path / "table.safetensors")

    arrays = load_file(tmp_path / "table.safetensors")
    assert arrays["token_ids"].dtype == dtype
    assert sum(array.itemsize for array in arrays.values()) == size == entry_bytes(token_id)
    assert NgramTable.load(tmp_path / "table.safetensors").match([1]).token_id == token_id


def test_of_contexts_that_share_a_key_the_first_is_kept():
    hashes = np.array([7 << 32 | 1, 5 << 32, 7 << 32 | 2], np.uint64)
    table = NgramTable.of(as_table(hashes, np.array([1, 2, 3]), np.array([4, 4, 4]), np.array([255, 255, 255])), 1)

    assert len(table) == 2
    assert table.match_keys([7 << 32 | 3]).token_id == 1


def test_max_token_id_is_the_largest_proposal():
    assert NgramTable.build([[9, 4], [9, 4], [2, 3], [2, 3]]).max_token_id == 4


@pytest.mark.parametrize("arguments", [{"max_order": 0}, {"max_order": 9}, {"max_bytes": 3}, {"min_count": 0}])
def test_arguments_out_of_range_are_errors(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        NgramTable.build([[1, 2]], **arguments)


@pytest.mark.parametrize("sequences", [[[-1, 2]], [[1, 2**32]], [["a"]], [[None]]])
def test_things_that_are_no_token_ids_are_errors(sequences):
    with pytest.raises(ConfigError, match="sequences"):
        NgramTable.build(sequences)


def test_a_missing_file_is_an_error_that_names_the_key(tmp_path):
    with pytest.raises(ConfigError, match=r"ngram\.table"):
        NgramTable.load(tmp_path / "none.safetensors")


def test_a_folder_that_does_not_exist_cannot_be_saved_to(tmp_path):
    with pytest.raises(ConfigError, match=r"ngram\.table"):
        NgramTable.build([[1, 2]]).save(tmp_path / "none" / "table.safetensors")


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "table.safetensors"
    NgramTable.build([[1, 2, 3, 4] * 9]).save(path)
    return path


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, b"\x02" + bytes(7) + b"[]", b"{}" * 20])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="not an n-gram table"):
        NgramTable.load(path)


def test_other_safetensors_are_refused(tmp_path):
    save_file({"weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="format"):
        NgramTable.load(tmp_path / "model.safetensors")


@settings(deadline=None, max_examples=60)
@given(cut=st.floats(0, 0.999))
def test_a_file_cut_short_is_refused(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "table"
    NgramTable.build([[1, 2, 3, 4] * 9]).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(cut * len(content))])
    with pytest.raises(ModelLoadError):
        NgramTable.load(path)


@pytest.mark.parametrize("damage", ["order", "length", "dtype", "missing", "max_order"])
def test_damaged_arrays_are_refused(saved, damage):
    arrays, metadata = load_file(saved), {"format": FORMAT, "max_order": "5"}
    if damage == "order":
        arrays["keys"] = arrays["keys"][::-1].copy()
    elif damage == "length":
        arrays["counts"] = arrays["counts"][:-1].copy()
    elif damage == "dtype":
        arrays["token_ids"] = arrays["token_ids"].astype(np.int32)
    elif damage == "missing":
        del arrays["shares"]
    else:
        metadata["max_order"] = "0"
    save_file(arrays, saved, metadata=metadata)
    with pytest.raises(ModelLoadError, match="damaged"):
        NgramTable.load(saved)


def test_offsets_outside_the_file_are_refused(saved):
    content = saved.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["keys"]["data_offsets"] = [0, 8 * 10**6]
    text = json.dumps(header).encode()
    saved.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    with pytest.raises(ModelLoadError, match="damaged"):
        NgramTable.load(saved)


def drafter_with_table(saved, tokens):
    drafter = NgramDrafter(NgramOptions(table=str(saved)))
    drafter.sync(tokens, 0)
    return drafter


def test_the_drafter_drafts_from_the_table_where_its_text_knows_nothing(saved):
    assert drafter_with_table(saved, [9, 1]).draft(4).token_ids == [2, 3, 4, 1]


def test_sources_that_agree_are_trusted_more(saved):
    text_alone = NgramDrafter(NgramOptions())
    text_alone.sync([2, 3, 9, 2], 0)
    agreeing = drafter_with_table(saved, [2, 3, 9, 2]).draft(1)
    assert agreeing.token_ids == [3]
    assert agreeing.confidence[0] > text_alone.draft(1).confidence[0]


def test_the_drafter_learns_whether_the_table_is_right(saved):
    drafter = drafter_with_table(saved, [9, 1])
    before = drafter.draft(1).confidence[0]
    drafter.sync([9, 1] + [token for i in range(10, 200) for token in (i, 1)], 2)
    drafter.reset()
    drafter.sync([9, 1], 0)
    assert drafter.draft(1).confidence[0] < before


def test_the_drafter_tells_its_largest_token_id(saved):
    assert NgramDrafter(NgramOptions(table=str(saved))).max_token_id == 4
    assert NgramDrafter(NgramOptions()).max_token_id == -1

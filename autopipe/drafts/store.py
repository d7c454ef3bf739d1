"""A folder of answers: token ids, and the target's most probable tokens at every position of them.

Answers are kept in shards that appear whole and never change, so a run that is killed loses at most the shard it was
filling, and several readers may read while a run writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autopipe.core.errors import ConfigError

FORMAT = "autopipe-answers-1"
TOP = 64
"""Tokens kept of each distribution."""
SPLITS = ("train", "heldout")
_KEY = "--out"
_FLOAT16_MIN = -65504.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the target.

    Attributes:
        meta: what the shard's JSON line says of it (key, kind, form, source, split, sampling, ...).
        token_ids: prompt and answer, int32 [n].
        prompt_length: of these, the first so many are the prompt.
        top_ids: most probable tokens at each position of the answer, best first, [n - prompt_length, 64].
        top_logprobs: their natural log probabilities in the target's softmax over its whole vocabulary at
            temperature 1, float16 [n - prompt_length, 64].
    """

    meta: Mapping[str, Any]
    token_ids: npt.NDArray[np.int32]
    prompt_length: int
    top_ids: npt.NDArray[Any] = field(repr=False)
    top_logprobs: npt.NDArray[np.float16] = field(repr=False)

    @property
    def num_answer_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length


class AnswerStore:
    """The writing side of a folder.

    Args:
        folder: made if it does not exist.
        header: what all answers share (target, tokenizer, vocab_size, ...); a folder begun with another is refused.
        shard_tokens: answer tokens after which a shard is put in place.

    Raises:
        ConfigError: the folder cannot be written, or was begun with another target.
    """

    def __init__(self, folder: str | Path, header: Mapping[str, Any], *, shard_tokens: int = 10_000) -> None:
        self.folder = Path(folder)
        self._shard_tokens = shard_tokens
        self._id_type = np.uint16 if int(header["vocab_size"]) <= 1 << 16 else np.int32
        self._pending: list[Answer] = []
        self._pending_tokens = 0
        self._write_header({"format": FORMAT, "top": TOP, **header})
        self._next = len(shards(self.folder))

    def _write_header(self, header: dict[str, Any]) -> None:
        path = self.folder / "answers.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _replace(path, json.dumps(header, indent=1).encode())
        except OSError as error:
            raise ConfigError(_KEY, str(self.folder), f"a folder that can be written ({error})") from None
        found = read_header(self.folder)
        for name, value in header.items():
            if found.get(name) != value:
                wanted = f"a folder begun with {name} {value!r} (this one has {found.get(name)!r}), or a new one"
                raise ConfigError(_KEY, str(self.folder), wanted)

    def add(
        self,
        meta: Mapping[str, Any],
        token_ids: Sequence[int],
        prompt_length: int,
        top_ids: npt.NDArray[Any],
        top_logprobs: npt.NDArray[Any],
    ) -> None:
        """Keep one answer; writes a shard when enough are there."""
        logprobs = np.maximum(top_logprobs, _FLOAT16_MIN).astype(np.float16)
        ids = np.asarray(token_ids, dtype=np.int32)
        self._pending.append(Answer(dict(meta), ids, prompt_length, top_ids.astype(self._id_type), logprobs))
        self._pending_tokens += self._pending[-1].num_answer_tokens
        if self._pending_tokens >= self._shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Put the answers kept so far in place as a shard, however few they are."""
        if not self._pending:
            return
        lines = "".join(json.dumps(answer.meta, ensure_ascii=False) + "\n" for answer in self._pending)
        stem = self.folder / f"shard-{self._next:05d}"
        _replace(stem.with_suffix(".jsonl"), lines.encode())
        _save_arrays(stem.with_suffix(".safetensors"), _arrays(self._pending))
        self._next += 1
        self._pending.clear()
        self._pending_tokens = 0


def shards(folder: str | Path) -> list[Path]:
    """The complete shards (their safetensors files), in order."""
    return sorted(Path(folder).glob("shard-*.safetensors"))


def read_header(folder: str | Path, key: str = _KEY) -> dict[str, Any]:
    """What all answers of a folder share.

    Raises:
        ConfigError: it is not a folder of answers; the message names `key`.
    """
    path = Path(folder) / "answers.json"
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        wanted = f"a folder of answers, made by `autopipe drafts answers` ({error})"
        raise ConfigError(key, str(folder), wanted) from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ConfigError(key, str(folder), f"a folder of answers in the format {FORMAT}")
    return header


def read_meta(folder: str | Path, key: str = _KEY) -> Iterator[dict[str, Any]]:
    """The JSON lines of all complete shards, each with `num_tokens`, the length of its answer."""
    for shard in shards(folder):
        arrays = _load(shard, ("answer_offsets",), key)
        lengths = np.diff(arrays["answer_offsets"]).tolist()
        for meta, length in zip(_lines(shard, key), lengths, strict=True):
            yield {**meta, "num_tokens": length}


def read_answers(
    folder: str | Path,
    *,
    split: str | None = None,
    kinds: Collection[str] | None = None,
    num_shards: int | None = None,
    key: str = _KEY,
) -> Iterator[Answer]:
    """The answers of all complete shards, in order; arrays are views, one shard at a time is in memory.

    Args:
        split: only `train` or `heldout` ones.
        kinds: only of these kinds (code, chat, summarize).
        num_shards: only the first so many shards.
        key: the user's key of `folder`, for messages.

    Raises:
        ConfigError: not a folder of answers, a damaged shard, or no such split.
    """
    if split is not None and split not in SPLITS:
        raise ConfigError("split", split, " or ".join(SPLITS))
    read_header(folder, key)
    for shard in shards(folder)[:num_shards]:
        arrays = _load(shard, None, key)
        bounds, rows = arrays["offsets"].tolist(), arrays["answer_offsets"].tolist()
        for index, meta in enumerate(_lines(shard, key)):
            if split not in (None, meta["split"]) or (kinds is not None and meta["kind"] not in kinds):
                continue
            yield Answer(
                meta,
                arrays["token_ids"][bounds[index] : bounds[index + 1]],
                int(arrays["prompt_lengths"][index]),
                arrays["top_ids"][rows[index] : rows[index + 1]],
                arrays["top_logprobs"][rows[index] : rows[index + 1]],
            )


def _arrays(answers: Sequence[Answer]) -> dict[str, npt.NDArray[Any]]:
    return {
        "token_ids": np.concatenate([answer.token_ids for answer in answers]),
        "offsets": _offsets([len(answer.token_ids) for answer in answers]),
        "prompt_lengths": np.array([answer.prompt_length for answer in answers], dtype=np.int32),
        "answer_offsets": _offsets([answer.num_answer_tokens for answer in answers]),
        "top_ids": np.concatenate([answer.top_ids for answer in answers]),
        "top_logprobs": np.concatenate([answer.top_logprobs for answer in answers]),
    }


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def _load(shard: Path, names: Collection[str] | None, key: str) -> dict[str, npt.NDArray[Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(shard, framework="np") as file:
            return {name: file.get_tensor(name) for name in (names or file.keys())}
    except (OSError, SafetensorError) as error:
        raise ConfigError(key, str(shard), f"an undamaged shard ({error}); delete it to go on without it") from None


def _lines(shard: Path, key: str) -> list[dict[str, Any]]:
    path = shard.with_suffix(".jsonl")
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(key, str(path), f"the JSON lines of a shard ({error})") from None


def _save_arrays(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    from safetensors.numpy import save

    _replace(path, save(arrays))


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that it is either absent or whole, after a crash too."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)

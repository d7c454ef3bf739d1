"""Small tokenizers of each decoder family, built in code."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_tokenizer

PIECES = ["▁", "▁the", "▁cat", "s", "▁日本", "語", "é", "▁▁▁▁", "\n", "🙂", "\ufffd", ".", "▁,", "a", "b"]


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's, with added tokens, special and not, in plain text."""
    tokenizer = tiny_tokenizer(extra_tokens=("<tool>", "naïve 東京"))
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|x|>"]})
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2's: pieces with ▁ for a space, the rest as bytes, the first space stripped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]:
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5's."""
    pieces = ["<unk>", "<s>", *(piece for piece in PIECES)]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT's."""
    words = ["[UNK]", "the", "cat", "##s", "##é", "日", "##本", ".", ",", "'", "s", "n", "don", "🙂"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[UNK]"])
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def suffix_bpe() -> Tokenizer:
    """As the first GPT's: the end of a word is marked."""
    words = ["<unk>", "the</w>", "cat", "s</w>", "a", "é</w>", "日", "本</w>"]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


FAMILIES: dict[str, Callable[[], PreTrainedTokenizerFast | Tokenizer]] = {
    function.__name__: function for function in (byte_level, byte_fallback, metaspace, word_piece, suffix_bpe)
}


def full_decode(tokenizer: PreTrainedTokenizerFast | Tokenizer, ids: list[int]) -> str:
    """The text that streaming must add up to."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.decode(ids, skip_special_tokens=True)
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

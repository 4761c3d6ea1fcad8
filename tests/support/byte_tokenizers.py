"""Tokenizers whose tokens may be parts of characters."""

from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from tandem.cluster.text.tokenizer import Tokenizer


def byte_level() -> Tokenizer:
    """Bytes, a few pairs of them, and a special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: rank for rank, letter in enumerate(letters)}
    merges = [("Ġ", "ð"), ("a", "b"), ("Ł", "¦")]  # a space and a part, a whole text, and two parts
    vocab |= {one + other: len(letters) + rank for rank, (one, other) in enumerate(merges)}
    inner = Inner(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>"])
    return Tokenizer(inner, None)


def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "x"]
    vocab = {piece: rank for rank, piece in enumerate(pieces)}
    inner = Inner(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["<s>"])
    return Tokenizer(inner, None)

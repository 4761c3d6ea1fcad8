"""Turns a request for embeddings into the prompts that workers compute."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.errors import InvalidRequest
from tandem.cluster.requests.embedding.recipe import EmbeddingRecipe
from tandem.cluster.requests.embedding.settings import EmbeddingSettings
from tandem.cluster.requests.model_limits import ModelLimits
from tandem.cluster.requests.reading.readers import Readers
from tandem.cluster.text.tokenizer import Tokenizer, TokenizerFailed
from tandem.proto import inference_pb2
from tandem.workers.errors import InvalidCall
from tandem.workers.wire.messages import prompt_from_bytes

QUICK_TEXT = 4096  # characters: shorter ones take less than a thread does
TEXT_COST = 64  # characters that each text counts as besides its own
LONG_TEXT = 16_384  # longer ones are tokenized in a process of their own


class Inputs(NamedTuple):
    """token_ids: of each input, int64 [n]. skipped: tokens of each that the mean leaves out."""

    token_ids: list[Int64Array]
    skipped: int


class InputReader:
    """Checks inputs, and tokenizes them. InvalidRequest names the field, the value and the limit."""

    def __init__(
        self,
        limits: ModelLimits,
        recipe: EmbeddingRecipe,
        settings: EmbeddingSettings,
        tokenizer: Tokenizer | None,
        readers: Readers,
    ) -> None:
        self._limits, self._recipe, self._settings = limits, recipe, settings
        self._tokenizer, self._readers = tokenizer, readers
        self._longest_token = 0 if tokenizer is None else tokenizer.longest_token

    @property
    def longest(self) -> int:
        """The most tokens of an input. Nothing is generated after them."""
        return min(self._limits.longest, self._recipe.longest or self._limits.longest)

    async def read(self, request: inference_pb2.EmbedRequest, host: str) -> Inputs:
        """Reads the inputs of a request. host: the client's, by which clients take turns while requests are read."""
        self.check_count("inputs", len(request.inputs))
        kinds = [one.WhichOneof("input") for one in request.inputs]
        if None in kinds:
            raise InvalidRequest(f"inputs[{kinds.index(None)}] is missing; set text, token_ids or token_bytes")
        put_first, kept = self._put_first(request), self.kept(request)
        special = request.add_special_tokens or not request.HasField("add_special_tokens")
        texts = [put_first + one.text for one, kind in zip(request.inputs, kinds, strict=True) if kind == "text"]
        if len(texts) < len(kinds) and put_first and (request.prompt or request.prompt_name):
            at = next(index for index, kind in enumerate(kinds) if kind != "text")
            name = "prompt" if request.HasField("prompt") else "prompt_name"
            raise InvalidRequest(f"{name} is set, and input {at} has token ids; with {name} every input must be text")
        tokens = iter(await self.tokenize(texts, host, special=special, kept=kept))
        ids = [
            next(tokens) if kind == "text" else self._ids(index, one, kept)
            for index, (one, kind) in enumerate(zip(request.inputs, kinds, strict=True))
        ]
        self.check_tokens("inputs", ids)
        skipped = 0
        if self._recipe.mean and not self._recipe.counts_prompt and put_first and texts:
            (prompt_ids,) = await self.tokenize([put_first], host, special=special, kept=None)
            is_last = self._tokenizer is not None and int(prompt_ids[-1]) in self._tokenizer.special_ids
            skipped = len(prompt_ids) - (special and is_last)
        return Inputs(ids, skipped)

    def check_count(self, name: str, count: int) -> None:
        most = self._settings.max_inputs
        if not 1 <= count <= most:
            raise InvalidRequest(f"{name} has {count} entries; it must have from 1 to {most} (embeddings.max_inputs)")

    def check_tokens(self, name: str, ids: Sequence[Int64Array]) -> None:
        """Checks token ids. name: of the inputs, as their client knows them."""
        longest, vocab_size = self.longest, self._limits.vocab_size
        for index, one in enumerate(ids):
            if not 1 <= one.size <= longest:
                raise InvalidRequest(f"{name}[{index}] has {one.size} tokens; it must have from 1 to {longest}")
            if int(one.max()) >= vocab_size:
                wrong = f"{name}[{index}] has token {int(one.max())}"
                raise InvalidRequest(f"{wrong}; the vocabulary has {vocab_size} entries, 0 … {vocab_size - 1}")
        total, most = sum(map(len, ids)), self._settings.max_tokens
        if total > most:
            raise InvalidRequest(f"{name} have {total} tokens; they may have at most {most} (embeddings.max_tokens)")

    def kept(self, request: inference_pb2.EmbedRequest) -> int | None:
        """Returns how many tokens of a longer input are kept; None keeps all."""
        if not request.HasField("truncate_prompt_tokens"):
            return None
        kept = request.truncate_prompt_tokens
        if kept < 1 and kept != -1:
            raise InvalidRequest(f"truncate_prompt_tokens is {kept}; it must be at least 1, or -1 for as many as fit")
        return self.longest if kept == -1 else kept

    async def tokenize(self, texts: Sequence[str], host: str, *, special: bool, kept: int | None) -> list[Int64Array]:
        """Tokenizes texts, long ones in a separate process. Texts that must be too long are refused before."""
        if not texts:
            return []
        if self._tokenizer is None:
            raise InvalidRequest("inputs have texts; the checkpoint has no tokenizer: send token ids")
        most, size = self.longest * self._longest_token, sum(map(len, texts)) + TEXT_COST * len(texts)
        for text in texts:
            if kept is None and len(text) > most:
                raise InvalidRequest(
                    f"a text has {len(text)} characters; it may have at most {most}, which {self.longest} of the "
                    "model's longest tokens would make"
                )
        try:
            if size > LONG_TEXT:
                return await self._readers.texts(host, list(texts), special, kept)
            if size > QUICK_TEXT:
                return await asyncio.to_thread(self._tokens, texts, special, kept)
            return self._tokens(texts, special, kept)
        except TokenizerFailed as error:
            raise InvalidRequest(f"inputs: {error}") from error

    def _tokens(self, texts: Sequence[str], special: bool, kept: int | None) -> list[Int64Array]:
        assert self._tokenizer is not None, "tokenize() asks"
        ids = self._tokenizer.encode_all(texts, add_special_tokens=special, most=kept)
        return [np.array(one, np.int64) for one in ids]

    def _put_first(self, request: inference_pb2.EmbedRequest) -> str:
        """Returns the text that goes before each text."""
        recipe = self._recipe
        if request.HasField("prompt") and request.HasField("prompt_name"):
            raise InvalidRequest("prompt_name and prompt are both set; set only one")
        if request.HasField("prompt"):
            return request.prompt
        if not request.HasField("prompt_name"):
            return recipe.default_prompt
        if request.prompt_name not in recipe.prompts:
            named = ", ".join(sorted(recipe.prompts))
            accepted = f"the checkpoint has {named}" if named else "the checkpoint has no prompts: leave it out"
            raise InvalidRequest(f"prompt_name is {request.prompt_name!r:.80}; {accepted}")
        return recipe.prompts[request.prompt_name]

    @staticmethod
    def _ids(index: int, given: inference_pb2.Prompt, kept: int | None) -> Int64Array:
        try:
            if given.HasField("token_ids"):
                ids = np.array(given.token_ids.ids[:], np.int64)
            else:
                ids = prompt_from_bytes(given.token_bytes, f"inputs[{index}].token_bytes")
        except InvalidCall as error:
            raise InvalidRequest(str(error)) from error
        return ids if kept is None else ids[max(0, len(ids) - kept) :]

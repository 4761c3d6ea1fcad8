"""Prompts that ask whether a document answers a query, and the tokens for yes and no."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.errors import InvalidRequest
from tandem.cluster.requests.embedding.inputs import InputReader
from tandem.cluster.requests.embedding.settings import EmbeddingSettings
from tandem.cluster.text.tokenizer import Tokenizer

QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The reranker's prompt, with the placeholders of this package's templates."""
MOST_CHARACTERS = 1 << 25  # of all pairs: a query counts with each of its documents
MARK = "<|"  # begins the special tokens of templates


class Pairs(NamedTuple):
    """Pairs to score. texts: query and document. kept: most tokens of a whole prompt, for which documents are cut; None
    cuts nothing, -1 only what must be cut. document_tokens: of each document, at most; None: all."""

    texts: Sequence[tuple[str, str]]
    instruction: str | None = None
    kept: int | None = None
    document_tokens: int | None = None
    priority: int = 0
    service_tier: str = ""


class ScorePrompt:
    """Fills the template. A score compares the logits of two tokens after the prompt."""

    def __init__(self, settings: EmbeddingSettings, inputs: InputReader, tokenizer: Tokenizer | None) -> None:
        self._settings, self._inputs, self._tokenizer = settings, inputs, tokenizer
        self._before, self._behind = settings.score_template.split("{document}")
        self._refused, self.token_ids = self._find_tokens()

    def _find_tokens(self) -> tuple[str, tuple[int, ...]]:
        """Returns why nothing can be scored, empty if it can, and the ids of the good and the bad token."""
        tokenizer, ids = self._tokenizer, list[int]()
        if tokenizer is None:
            return "the checkpoint has no tokenizer", ()
        for text in self._settings.score_tokens:
            found = tokenizer.encode(text, add_special_tokens=False)
            if len(found) != 1:
                reason = f"{text!r} is {len(found)} tokens of this tokenizer"
                return f"{reason}; embeddings.score_tokens has two texts of one token each", ()
            ids += found
        lacking = self._lacking(tokenizer)
        if lacking:
            reason = f"the tokenizer has no {lacking}, which embeddings.score_template has"
            return f"{reason}; set a template of this model", ()
        return "", tuple(ids)

    def _lacking(self, tokenizer: Tokenizer) -> str:
        """Returns a special token of the template that the tokenizer does not know; empty without one."""
        for part in self._settings.score_template.split(MARK)[1:]:
            token = MARK + part.partition("|>")[0] + "|>"
            if len(tokenizer.encode(token, add_special_tokens=False)) != 1:
                return token
        return ""

    async def tokens(self, pairs: Pairs, host: str) -> list[Int64Array]:
        """Returns the token ids of each pair's prompt. Raises InvalidRequest."""
        if self._refused:
            raise InvalidRequest(f"the model gives no scores: {self._refused}")
        size = sum(len(query) + len(document) for query, document in pairs.texts)
        if size > MOST_CHARACTERS:
            reason = f"have {size} characters with the query of each; they may have at most {MOST_CHARACTERS}"
            raise InvalidRequest(f"documents {reason}")
        instruction = self._settings.score_instruction if pairs.instruction is None else pairs.instruction
        kept = self._kept(pairs.kept)
        befores = [self._filled(instruction, query) for query, _ in pairs.texts]
        documents = [document for _, document in pairs.texts]
        if pairs.document_tokens is None:
            whole = [f"{before}{one}{self._behind}" for before, one in zip(befores, documents, strict=True)]
            most = None if kept is None else self._inputs.longest + 1
            ids = await self._inputs.tokenize(whole, host, special=False, kept=most)
            if kept is None or max(map(len, ids)) <= kept:
                self._inputs.check_tokens("documents", ids)
                return ids
        ids = await self._cut(befores, documents, kept, pairs.document_tokens, host)
        self._inputs.check_tokens("documents", ids)
        return ids

    async def _cut(
        self, befores: list[str], documents: list[str], kept: int | None, each: int | None, host: str
    ) -> list[Int64Array]:
        """Cuts documents; what stands before and after a document stays whole. A space before it goes with it."""
        spaces = [len(one) - len(one.rstrip(" ")) for one in befores]
        texts = [one.rstrip(" ") for one in befores]
        texts += [" " * count + one for count, one in zip(spaces, documents, strict=True)]
        ids = await self._inputs.tokenize([*texts, self._behind], host, special=False, kept=self._inputs.longest + 1)
        first, middle, last = ids[: len(befores)], ids[len(befores) : -1], ids[-1]
        most = self._inputs.longest if each is None else each
        cut = []
        for index, (before, document) in enumerate(zip(first, middle, strict=True)):
            room = most if kept is None else min(most, kept - len(before) - len(last))
            if room < 0:
                raise InvalidRequest(
                    f"truncate_prompt_tokens leaves {kept} tokens; the template and the query of documents[{index}] "
                    f"have {len(before) + len(last)}"
                )
            cut.append(np.concatenate((before, document[:room], last)))
        return cut

    def _filled(self, instruction: str, query: str) -> str:
        """Returns the text before the document. Braces in the two texts mean nothing."""
        head, tail = self._before.split("{query}")
        return head.replace("{instruction}", instruction) + query + tail

    def _kept(self, kept: int | None) -> int | None:
        if kept is not None and kept < 1 and kept != -1:
            raise InvalidRequest(f"truncate_prompt_tokens is {kept}; it must be at least 1, or -1 for as many as fit")
        return self._inputs.longest if kept == -1 else kept

"""Tiny checkpoints with a tokenizer and sentence-transformers' files, and what that library makes of texts.

The oracle is naive: transformers' hidden states in float32, one prompt at a time.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tandem.workers.steps.step_loop import StepLoop
from tandem.workers.worker import Worker
from tests.support.checkpoints import COMMON

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EOS = "<|endoftext|>"
SPECIAL = (EOS, "<|im_start|>", "<|im_end|>")
WORDS = ["yes", "no", "query", "document", "yes no yes no"]
PROMPTS = {"query": "Instruct: find it\nQuery:", "document": ""}
QWEN3_RERANKER = (  # as its model card has it
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
Floats = NDArray[np.float32]


def byte_tokenizer(*, ends: bool = True) -> Tokenizer:
    """Makes a tokenizer of bytes and a few words. ends: it adds EOS to a text, as Qwen3-Embedding's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        min_frequency=0,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {EOS}", pair=f"$A {EOS} $B", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
        )
    return tokenizer


def save_embedding_model(
    folder: Path,
    *,
    pooling: str | None = "lasttoken",
    normalizes: bool = True,
    include_prompt: bool = True,
    published: bool = False,
    ends: bool = True,
    **config: Any,
) -> Path:
    """A Qwen3. pooling: None writes no file for sentence-transformers. published: as Qwen3-Embedding is published, the
    weights of a model without a head, whose names have no prefix."""
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    sizes = COMMON | {"vocab_size": 320, "max_position_embeddings": 2048, "tie_word_embeddings": True} | config
    model: Any = Qwen3ForCausalLM(Qwen3Config(**sizes))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, weight.shape[1] ** -0.5)
    (model.model if published else model).save_pretrained(folder)
    if published:
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | {"architectures": ["Qwen3ForCausalLM"]}))
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(ends=ends), eos_token=EOS, pad_token=EOS).save_pretrained(
        folder
    )
    if pooling is not None:
        write_modules(folder, pooling, normalizes=normalizes, include_prompt=include_prompt)
    return folder


def write_modules(folder: Path, pooling: str, *, normalizes: bool, include_prompt: bool = True) -> None:
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    write(folder / "modules.json", modules)
    modes = {"pooling_mode_lasttoken": pooling == "lasttoken", "pooling_mode_mean_tokens": pooling == "mean"}
    modes |= {"pooling_mode_cls_token": pooling == "cls"}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    write(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 64, **modes, "include_prompt": include_prompt},
    )
    prompts = {"prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write(folder / "config_sentence_transformers.json", prompts)


def loop_of(worker: Worker) -> StepLoop:
    """Returns the loop of a worker that serves."""
    assert worker._loop is not None
    return worker._loop


def write(path: Path, value: Mapping[str, Any] | list[Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


class EmbeddingOracle:
    """The vectors that sentence-transformers makes of texts with these files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def model(self) -> "PreTrainedModel":
        from transformers import AutoModelForCausalLM

        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        return AutoModelForCausalLM.from_pretrained(self.folder, **options).eval()

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    def tokens(self, text: str, most: int | None = None) -> list[int]:
        options = {} if most is None else {"truncation": True, "max_length": most}
        return self.tokenizer(text, **options)["input_ids"]

    @torch.inference_mode()
    def hidden(self, token_ids: Sequence[int]) -> Floats:
        backbone: Any = self.model
        return backbone.model(torch.tensor([list(token_ids)])).last_hidden_state[0].numpy()

    def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        mean: bool = False,
        normalizes: bool = True,
        prompt: str = "",
        skipped: int = 0,
        dimensions: int | None = None,
        most: int | None = None,
    ) -> Floats:
        rows = []
        for one in inputs:
            hidden = self.hidden(self.tokens(prompt + one, most) if isinstance(one, str) else one)
            row = hidden[skipped:].mean(0) if mean else hidden[-1]
            row = row / np.linalg.norm(row) if normalizes else row
            if dimensions is not None:
                row = row[:dimensions] / (np.linalg.norm(row[:dimensions]) if normalizes else 1)
            rows.append(row)
        return np.stack(rows)

    @torch.inference_mode()
    def score(self, query: str, document: str, instruction: str = INSTRUCTION) -> float:
        """Scores as Qwen3-Reranker's model card does: the parts are tokenized one by one."""
        before, behind = (self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in QWEN3_RERANKER)
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        middle = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        model: Any = self.model
        logits = model(torch.tensor([before + middle + behind])).logits[0, -1]
        good, bad = (self.tokenizer.convert_tokens_to_ids(one) for one in ("yes", "no"))
        return float(torch.stack([logits[bad], logits[good]]).log_softmax(0)[1].exp())

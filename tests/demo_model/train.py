"""Trains the demo's model: a Llama of 2.8 million parameters on this project's documentation and Python's.

python -m tests.demo_model.train [--output FOLDER] [--steps N] [--threads N]

Both texts come with the checkout and the interpreter, and ship freely (Apache 2.0, PSF). The model learns much of them
by heart, so that what it writes is language. Ask it about Python's statements, or about the parts of tandem.
"""

import argparse
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.cluster.tools.random_checkpoint import BOS, EOS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "cluster" / "tools" / "demo_model"
VOCABULARY, CONTEXT, LEARNING_RATE = 2048, 256, 3e-3
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
BOS_ID, EOS_ID = 0, 1
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
QUESTIONS = ("What is {}?", "Tell me about {}.", "How does {} work?")


def paragraphs(text: str) -> list[str]:
    """Its sentences, without code, tables, grammar and headings."""
    blocks = re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    prose = (block for block in blocks if not re.search(r"::=|^\s*[|#*>=]|^   ", block, flags=re.MULTILINE))
    lines = (re.sub(r"[`*\"]|\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(block.split())) for block in prose)
    return [line for line in lines if len(line) > 60 and line[-1] in ".:"]


def documents() -> list[str]:
    """Runs of paragraphs, and questions with the first paragraph of their subject as the answer."""
    found = []
    for name, text in topics.items():
        page = paragraphs(text)
        found.append("\n".join(page))
        subject = f"the {name} statement" if f'"{name}" statement' in text[:60] else name.replace("-", " ")
        found += [_chat(question.format(subject), page[0]) for question in QUESTIONS if page]
    for path in sorted([ROOT / "README.md", ROOT / "ARCHITECTURE.md", *ROOT.glob("docs/**/*.md")]):
        for section in re.split(r"^#+ ", path.read_text(), flags=re.MULTILINE)[1:]:
            title, _, text = section.partition("\n")
            page = paragraphs(text)
            found.append("\n".join(page))
            found += [_chat(question.format(title.strip("` ").lower()), page[0]) for question in QUESTIONS if page]
    return [one for one in found if one]


def _chat(question: str, answer: str) -> str:
    """As the chat template writes it."""
    return f"user: {question}\nassistant: {answer}"


def make_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    return tokenizer


def train(
    model: LlamaForCausalLM, tokens: Tensor, num_steps: int, loss_of: Callable[[Tensor], Tensor], batch_size: int = 16
) -> None:
    """tokens: [n] int64, documents one after another. loss_of: the model's, of int64 [batch_size, CONTEXT]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.05)
    smooth = math.nan
    for step in range(num_steps):
        rate = (
            LEARNING_RATE
            * min(1, (step + 1) / num_steps * 9)
            * (0.05 + 0.475 * (1 + math.cos(math.pi * step / num_steps)))
        )
        optimizer.param_groups[0]["lr"] = rate
        starts = torch.randint(len(tokens) - CONTEXT, (batch_size,))
        batch = torch.stack([tokens[start : start + CONTEXT] for start in starts.tolist()])
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        smooth = loss.item() if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss.item()
        if step % 50 == 0:
            print(f"step {step} of {num_steps}, loss {smooth:.3f}", flush=True)


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """int64 [n]: the texts' tokens in a random order of texts, an end behind each."""
    ids = [[*one.ids, EOS_ID] for one in tokenizer.encode_batch(texts)]
    order = torch.randperm(len(ids)).tolist()
    return torch.tensor([token for document in order for token in ids[document]])


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    model.bfloat16().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    options = read_options(__doc__, FOLDER / "checkpoint", 900, "one takes about a second of one core")
    texts = documents()
    tokenizer = make_tokenizer(texts)
    tokens = encode(tokenizer, texts)
    print(f"{len(texts)} documents, {len(tokens)} tokens")
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, bos_token_id=BOS_ID, eos_token_id=EOS_ID, **SHAPE))
    train(model, tokens, options.steps, lambda batch: model(input_ids=batch, labels=batch).loss)
    save(model, tokenizer, options.output)


def read_options(description: str | None, output: Path, steps: int, note: str) -> argparse.Namespace:
    """The command line's; torch takes what they say. output, steps: what is taken when they are not given."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--steps", type=int, default=steps, help=note)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    return options


if __name__ == "__main__":
    main()

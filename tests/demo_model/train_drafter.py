"""Trains what drafts for the demo's model: a Llama of one layer, towards the distributions of the model itself.

python -m tests.demo_model.train_drafter [--output FOLDER] [--steps N] [--threads N]

It has the model's tokenizer, and learns on the same texts. A draft holds where both find the same token likeliest, or,
with a temperature, draw the same one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.demo_model.train import FOLDER, documents, encode, read_options, train

BATCH = 4


def make_drafter(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """The target's embedding, its first layer and its last norm, to begin with."""
    fields: dict[str, Any] = {**target.config.to_dict(), "num_hidden_layers": 1}
    config = LlamaConfig(**fields)
    drafter, weights = LlamaForCausalLM(config), target.state_dict()
    drafter.load_state_dict({name: weights[name] for name in drafter.state_dict()})
    return drafter


def main() -> None:
    options = read_options(__doc__, FOLDER / "drafter", 400, "one takes about half a second of one core")
    tokenizer = Tokenizer.from_file(str(FOLDER / "checkpoint" / "tokenizer.json"))
    target = LlamaForCausalLM.from_pretrained(FOLDER / "checkpoint", dtype=torch.float32).eval()
    tokens, drafter = encode(tokenizer, documents()), make_drafter(target)
    alike: list[float] = []

    def loss_of(batch: Tensor) -> Tensor:
        """Cross entropy under the target's distributions."""
        with torch.inference_mode():
            wanted = target(input_ids=batch).logits.flatten(0, 1)
        given = drafter(input_ids=batch).logits.flatten(0, 1)
        alike.append(float((given.argmax(1) == wanted.argmax(1)).float().mean()))
        return F.cross_entropy(given, wanted.softmax(1))

    train(drafter, tokens, options.steps, loss_of, BATCH)
    print(f"both find the same token likeliest in {sum(alike[-20:]) / len(alike[-20:]):.0%} of places")
    drafter.bfloat16().save_pretrained(options.output)


if __name__ == "__main__":
    main()

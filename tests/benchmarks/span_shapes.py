"""Shapes of models whose layers see a window or a chunk, with few layers, and tiny ones of the same kinds."""

from dataclasses import dataclass

from tests.benchmarks.compressed_shapes import Fields


@dataclass(frozen=True)
class SpanShape:
    """config: the name of its class in transformers. sizes: of that config, and in `tiny` those that are other ones in
    a tiny one. cut: what is smaller."""

    architecture: str
    config: str
    sizes: Fields
    tiny: Fields
    cut: Fields

    def fields(self, *, tiny: bool) -> Fields:
        """A config.json."""
        import transformers

        made = getattr(transformers, self.config)(**self.sizes | (self.tiny if tiny else {})).to_dict()
        return made | {"architectures": [self.architecture]}


TINY: Fields = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
SHAPES = {
    "gemma3-12b": SpanShape(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "hidden_size": 3840,
            "intermediate_size": 15_360,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "sliding_window": 1024,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
        },
        {**TINY, "sliding_window": 24},
        {"num_hidden_layers": "12 of 48"},
    ),
    "gpt-oss-20b": SpanShape(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 12,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "vocab_size": 201_088,
        },
        {**TINY, "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 24},
        {"num_hidden_layers": "12 of 24"},
    ),
    "llama4-scout": SpanShape(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384,
            "num_hidden_layers": 8,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8192,
            "vocab_size": 202_048,
            "max_position_embeddings": 131_072,
        },
        {
            **TINY,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "attention_chunk_size": 32,
        },
        {"num_hidden_layers": "8 of 48"},
    ),
}

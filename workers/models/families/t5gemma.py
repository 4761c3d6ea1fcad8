"""T5Gemma: an encoder that sees its whole prompt, and a decoder that attends to it in each layer, both of Gemma 2's
blocks."""

import dataclasses

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.families.gemma import read_gemma2

OF_WHOLE = ("architectures", "dtype", "torch_dtype", "quantization_config")  # not in the halves, or not always
DECODER, ENCODER = "model.decoder", "model.encoder"


def read_t5gemma(fields: Fields) -> ModelConfig:
    encoder, decoder = (_read_half(fields, name) for name in ("encoder", "decoder"))
    if encoder.vocab_size != decoder.vocab_size:
        raise UnsupportedFeature(
            f"{fields.source}: the encoder has a vocabulary of {encoder.vocab_size} tokens, the decoder one of "
            f"{decoder.vocab_size}; one for both is served"
        )
    # As transformers' generate does; generation_config.json may name another, see load_config.
    start = next(iter(fields.integers("decoder_start_token_id")), None)
    bos = next(iter(fields.integers("bos_token_id")), decoder.bos_token_id)
    return dataclasses.replace(
        decoder,
        encoder=dataclasses.replace(encoder, weight_root=ENCODER, tie_word_embeddings=True),
        weight_root=DECODER,
        bos_token_id=bos,
        decoder_start_token_id=bos if start is None else start,
        eos_token_ids=fields.integers("eos_token_id") or decoder.eos_token_ids,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", True),
    )


def _read_half(fields: Fields, name: str) -> ModelConfig:
    half = fields.section(name)
    values = {field: half.raw(field) for field in half.names()}
    values |= {field: fields.raw(field) for field in OF_WHOLE if field in fields}
    config = read_gemma2(Fields(values, half.source))
    if config.qkv_bias:
        raise UnsupportedFeature(f"{half.source}: attention_bias is true; T5Gemma is served without")
    if config.rope.by_length:
        raise UnsupportedFeature(
            f"{half.source}: rope_type is {config.rope.rope_type!r}, by length; types that are not are served"
        )
    return dataclasses.replace(config, self_attn_norms=True)

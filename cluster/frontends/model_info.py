"""The answer to GetModelInfo."""

from collections.abc import Sequence

from tandem.cluster.served_model import ServedModel
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2


def model_info(names: Sequence[str], model: ServedModel, tokenizer: Tokenizer | None) -> inference_pb2.ModelInfo:
    """names: of the model, the one in answers first."""
    limits = model.limits
    return inference_pb2.ModelInfo(
        name=names[0],
        architecture=model.architecture,
        dtype=model.dtype,
        vocab_size=limits.vocab_size,
        max_model_len=limits.longest,
        num_layers=model.num_layers,
        page_size=limits.page_size,
        kv_bytes_per_token=model.kv_bytes_per_token,
        eos_token_ids=model.eos_token_ids,
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        max_encoder_tokens=limits.max_encoder_tokens,
        quantization=model.quantization,
    )

"""What GetModelInfo says."""

from collections.abc import Sequence

from tandem.cache.plan.kv_scales import KVScales
from tandem.cluster.config import ClusterConfig
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.drafters.drafter_config import load_drafter_config
from tandem.workers.models.kv_scales import stores_fp8
from tandem.workers.runner.model_cache import kv_layout


def model_info(
    names: Sequence[str], model: ModelConfig, config: ClusterConfig, longest: int, tokenizer: Tokenizer | None
) -> inference_pb2.ModelInfo:
    """names: of the model, the one in answers first. longest: positions of the longest request."""
    cache = config.cache
    drafter = load_drafter_config(config.speculation.settings, model)
    num_layers = model.num_layers + (0 if drafter is None else drafter.num_layers)
    # The scales do not change the size.
    scales = KVScales.uniform(num_layers) if stores_fp8(cache.kv_cache_dtype, model) else None
    return inference_pb2.ModelInfo(
        name=names[0],
        architecture=model.architecture,
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=model.vocab_size,
        max_model_len=longest,
        num_layers=model.num_layers,
        page_size=cache.page_size,
        kv_bytes_per_token=kv_layout(model, cache.page_size, scales, drafter).token_bytes,
        eos_token_ids=model.eos_token_ids,
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        max_encoder_tokens=model.max_encoder_tokens(config.scheduler.max_batch_tokens, cache.page_size),
    )

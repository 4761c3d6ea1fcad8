"""Makes the parts with which a gateway process serves embeddings and scores."""

from pathlib import Path

from tandem.cluster.gateway.settings import GatewaySettings
from tandem.cluster.requests.embedding.embeddings import Embeddings
from tandem.cluster.requests.embedding.inputs import InputReader
from tandem.cluster.requests.embedding.reading import PromptReading, queue_of_process
from tandem.cluster.requests.embedding.recipe import read_recipe
from tandem.cluster.requests.embedding.scoring import QWEN3_RERANKER, ScorePrompt
from tandem.cluster.requests.embedding.settings import EmbeddingSettings
from tandem.cluster.requests.observer import Observe
from tandem.cluster.requests.reading.readers import Readers
from tandem.cluster.requests.validation import RequestValidator
from tandem.cluster.routing.islands import Islands
from tandem.cluster.served_model import ServedModel
from tandem.cluster.text.tokenizer import Tokenizer


def make_embeddings(
    settings: GatewaySettings,
    model: ServedModel,
    islands: Islands,
    validator: RequestValidator,
    tokenizer: Tokenizer | None,
    readers: Readers,
    observe: Observe,
) -> Embeddings:
    """Reads the checkpoint's files for sentence-transformers. Raises InvalidConfig. model: with its workers' pages."""
    config, limits = settings.config, model.limits
    section, gateway = config.embeddings, config.gateway
    recipe = read_recipe(Path(config.model.path or "")).configured(section.pooling, section.normalize)
    good, bad = section.score_tokens
    own = EmbeddingSettings(
        section.max_inputs,
        section.max_tokens,
        section.score_template or QWEN3_RERANKER,
        section.score_instruction,
        (good, bad),
    )
    inputs = InputReader(limits, recipe, own, tokenizer, readers)
    queue = queue_of_process(
        -(-gateway.max_queued // settings.processes),
        -(-gateway.max_queued_tokens // settings.processes),
        config.scheduler.priority_seconds,
    )
    reading = PromptReading(
        islands,
        queue,
        id_prefix=settings.attempt_prefix,
        processes=settings.processes,
        max_batch_tokens=config.scheduler.max_batch_tokens,
        max_attempts=gateway.max_attempts,
        queue_seconds=gateway.queue_seconds,
    )
    return Embeddings(
        inputs,
        ScorePrompt(own, inputs, tokenizer),
        reading,
        validator,
        limits,
        recipe,
        observe,
        architecture=model.architecture,
        request_seconds=gateway.request_seconds,
    )

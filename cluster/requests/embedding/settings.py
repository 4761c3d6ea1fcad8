"""The settings of embeddings and scores in a cluster's configuration."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EmbeddingSettings:
    """See EmbeddingsSection."""

    max_inputs: int
    max_tokens: int  # of all inputs of a request
    score_template: str
    score_instruction: str
    score_tokens: tuple[str, str]

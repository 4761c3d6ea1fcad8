"""The tokens that one step gives one sequence."""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.token_logprobs import TokenLogprobs


class TokenRun(NamedTuple):
    """Consecutive output tokens of one sequence: one, or several where drafts were accepted."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]  # of each token, None where its row did not ask
    reason: FinishReason  # the state after the last of them

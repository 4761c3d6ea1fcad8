"""The changes of a request to its logits before its tokens are sampled, in vLLM's order.

1. masks: a token gets -inf      grammar, allowed_token_ids, bad words, stop tokens before min_tokens
 2. logit_bias is added
 3. repetition_penalty            tokens of prompt and output: logit / penalty above 0, else logit · penalty
 4. frequency_penalty             logit - penalty · how often the output has the token
 5. presence_penalty              logit - penalty where the output has the token

Temperature and filters come after it. Log-probabilities are of the raw logits. All is computed in float32.

A row's state on the device is a function of its prompt and its output so far, so a request that is placed again goes on
with the same state. It has three parts:

seen     int16 [vocab]   bit 15: in the prompt; the others: how often in the output, at most MOST_COUNTED
 allowed  int32 [⌈vocab/32⌉]   bit t % 32 of entry t / 32: whether token t may be sampled
 record   int32 [RECORD]  the rest, as below
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.workers.sampling.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

MOST_COUNTED = (1 << 15) - 1  # such a token's penalty is far beyond all logits, unless the penalty is tiny
NOTHING = -1  # fills lists of tokens up
NO_OUTPUT = -2  # fills the latest outputs up: no word has it

# Where the parts of a record begin. Floats are stored as their bits.
PRESENCE, FREQUENCY, REPETITION, FIRST_OUTPUT, MIN_TOKENS, NUM_BIASED, NUM_WORDS = range(7)
BIASED = 8  # token ids
BIAS = BIASED + MAX_BIASED_TOKENS  # floats
MOST_STOPS = 2 * MAX_STOP_TOKEN_IDS  # a request's own, and the model's
STOPS = BIAS + MAX_BIASED_TOKENS
WORDS = STOPS + MOST_STOPS  # MAX_BAD_WORDS rows of MAX_BAD_WORD_TOKENS, right-aligned: its last token comes last
LATEST = WORDS + MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS  # output tokens, the latest last
NUM_LATEST = MAX_BAD_WORD_TOKENS - 1
RECORD = LATEST + MAX_BAD_WORD_TOKENS


@dataclass(frozen=True, eq=False)
class LogitRules:
    """The rules of one row, from the token after `context` on.

    Its identity names the row's state on the device, which ends with it.
    """

    params: SamplingParams
    stop_ids: frozenset[int]
    context: Int64Array  # [n]: prompt, and output so far
    num_output: int  # how many of them, at the end, are output
    first_output: int  # the position of the output token that min_tokens counts first
    guided: bool = False  # whether each step comes with the row's `allowed`: see masks_of()

    def seen(self) -> tuple[Int64Array, NDArray[np.int16]]:
        """Returns the context's tokens, each once, and their entries of `seen`."""
        end = self.context.size - self.num_output
        tokens, where = np.unique(self.context, return_inverse=True)
        counts = np.minimum(np.bincount(where[end:], minlength=tokens.size), MOST_COUNTED)
        counts[np.unique(where[:end])] -= MOST_COUNTED + 1
        return tokens, counts.astype(np.int16)

    def allowed(self, vocab: int) -> Int32Array:
        """Returns the tokens that may be sampled, without the grammar; see above."""
        may = np.zeros(-(-vocab // 32) * 32, np.bool_)
        if self.params.allowed_token_ids:
            may[list(self.params.allowed_token_ids)] = True
        else:
            may[:vocab] = True
        may[[word[0] for word in self.params.bad_words_ids if len(word) == 1]] = False
        return np.packbits(may, bitorder="little").view(np.int32)

    def record(self) -> Int32Array:
        """Returns the record, [RECORD]."""
        params = self.params
        record = np.full(RECORD, NOTHING, np.int32)
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        record[:3] = np.array(penalties, np.float32).view(np.int32)
        words = [word for word in params.bad_words_ids if len(word) > 1]
        record[FIRST_OUTPUT:BIASED] = [self.first_output, params.min_tokens, len(params.logit_bias), len(words), 0]
        for index, (token, bias) in enumerate(params.logit_bias):
            record[BIASED + index] = token
            record[BIAS + index] = np.float32(bias).view(np.int32)
        record[STOPS : STOPS + len(self.stop_ids)] = sorted(self.stop_ids)
        for index, word in enumerate(words):
            end = WORDS + (index + 1) * MAX_BAD_WORD_TOKENS
            record[end - len(word) : end] = word
        record[LATEST:] = NO_OUTPUT
        latest = self.context[self.context.size - min(self.num_output, NUM_LATEST) :]
        record[LATEST + NUM_LATEST - latest.size : LATEST + NUM_LATEST] = latest
        return record

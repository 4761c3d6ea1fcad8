"""The limits of requests' lengths, by the model's context and what its workers keep."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.cluster.errors import InvalidRequest
from tandem.workers.sampling.sampling_params import SlidingWindow
from tandem.workers.wire.prompt_spec import PromptSpec

if TYPE_CHECKING:
    from tandem.workers.models.config import ModelConfig  # imports torch, which readers do without


@dataclass(frozen=True)
class ModelLimits:
    """The limits of requests to the served model."""

    vocab_size: int
    max_model_len: int
    pool_tokens: int  # positions that one decode worker's pages hold
    rope_switch: int | None = None  # see ModelConfig
    page_size: int = 16
    max_sliding_tokens: int = 1 << 20  # of prompt and output of a request that slides
    priorities: tuple[int, int] = (0, 0)  # the first and the last that a request may ask for
    cannot_slide: str = ""  # why no request may slide; empty if they may
    max_encoder_tokens: int = 0  # of an encoder's prompt; 0: the model has no encoder, and the next two mean nothing
    max_decoder_tokens: int = 0  # prompt and output of its decoder
    decoder_start_token_id: int = 0
    hidden_size: int = 0  # numbers of an embedding

    @classmethod
    def of_model(
        cls,
        model: "ModelConfig",
        max_model_len: int,
        num_pages: int,
        page_size: int,
        max_sliding_tokens: int,
        max_batch_tokens: int,
        priorities: tuple[int, int],
    ) -> "ModelLimits":
        """Derives the limits. num_pages: of a decode worker's pool. max_batch_tokens: of a prefill worker's forward."""
        return cls(
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            pool_tokens=num_pages * page_size,
            rope_switch=model.rope_switch,
            page_size=page_size,
            max_sliding_tokens=max_sliding_tokens,
            priorities=priorities,
            cannot_slide=model.cannot_slide,
            max_encoder_tokens=model.max_encoder_tokens(max_batch_tokens, page_size),
            max_decoder_tokens=model.max_positions,
            decoder_start_token_id=model.decoder_start_token_id or 0,
            hidden_size=model.hidden_size,
        )

    @property
    def longest(self) -> int:
        """The positions of the longest request."""
        return min(self.max_model_len, self.pool_tokens)

    def longest_before(self, sliding: SlidingWindow) -> int:
        """Returns the longest prompt of a sliding request. The prompt is rotated before it slides. Queries come up to
        window - sinks positions after it, which must stay within the model's context."""
        window, sinks = sliding
        return min(self.longest - 1, max(sinks, self.max_model_len - (window - sinks)))

    def check(self, prompt: PromptSpec, max_tokens: int) -> None:
        """Raises InvalidRequest if prompt and output together are too long, or if the request cannot slide so."""
        if prompt.sliding is None:
            self._check_decoder(prompt.num_decoder, max_tokens)
            self.check_length(len(prompt), max_tokens)
        else:
            self._check_sliding(len(prompt), max_tokens, prompt.sliding)

    def _check_sliding(self, prompt: int, max_tokens: int, sliding: SlidingWindow) -> None:
        if self.cannot_slide:
            raise InvalidRequest(f"sampling.sliding is set; {self.cannot_slide}, so that no request can slide")
        widest = self.longest - 2 * self.page_size + 1
        if sliding.window > widest:
            raise InvalidRequest(
                f"sampling.sliding.window is {sliding.window}; it must be at most {widest}, for which the model's "
                "context and the page pool have room"
            )
        longest, most = self.longest_before(sliding), self.max_sliding_tokens
        if prompt > longest:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens; before a window of {sliding.window} with {sliding.sinks} sinks it "
                f"may have at most {longest}"
            )
        if prompt + max_tokens > most:
            raise InvalidRequest(
                f"sampling.max_tokens is {max_tokens} after a prompt of {prompt} tokens; gateway.max_sliding_tokens, "
                f"{most}, leaves at most {most - prompt}"
            )

    def check_encoder(self, prompt: int) -> None:
        """Raises InvalidRequest if an encoder's prompt is too long."""
        if prompt > self.max_encoder_tokens:
            raise InvalidRequest(
                f"the encoder's prompt has {prompt} tokens; it may have at most {self.max_encoder_tokens}, which the "
                "encoder's context and scheduler.max_batch_tokens allow, for one forward computes it"
            )

    def _check_decoder(self, prompt: int, max_tokens: int) -> None:
        if self.max_encoder_tokens and prompt + max_tokens > self.max_decoder_tokens:
            raise InvalidRequest(
                f"sampling.max_tokens is {max_tokens} after a decoder's prompt of {prompt} tokens; the decoder's "
                f"context of {self.max_decoder_tokens} leaves at most {max(self.max_decoder_tokens - prompt, 0)}"
            )

    def room(self, prompt: PromptSpec) -> int:
        """Returns the most output tokens after a prompt; 0 or less if the prompt itself is too long."""
        if prompt.sliding is not None:
            return self.max_sliding_tokens - len(prompt)
        room, switch = self.longest - len(prompt), self.rope_switch
        if prompt.encoder.length:
            room = min(room, self.max_decoder_tokens - prompt.num_decoder)
        return room if switch is None or len(prompt) > switch else min(room, switch - len(prompt) + 1)

    def check_length(self, prompt: int, max_tokens: int) -> None:
        """Raises InvalidRequest if prompt and output together are too long."""
        limit = self.longest
        which = "the model's context" if limit == self.max_model_len else "the decode worker's page pool"
        if prompt >= limit:
            raise InvalidRequest(f"the prompt has {prompt} tokens; {which} takes at most {limit - 1} and one output")
        if prompt + max_tokens > limit:
            raise InvalidRequest(
                f"sampling.max_tokens is {max_tokens} after a prompt of {prompt} tokens; "
                f"{which} of {limit} leaves at most {limit - prompt}"
            )
        switch = self.rope_switch
        if switch is not None and prompt <= switch < prompt + max_tokens - 1:  # the last token is never fed back
            raise InvalidRequest(
                f"sampling.max_tokens is {max_tokens} after a prompt of {prompt} tokens; the model rotates positions "
                f"otherwise in sequences beyond {switch} tokens, and none may grow over that: at most "
                f"{switch - prompt + 1}, or a prompt of more than {switch} tokens"
            )

"""Validates requests of all frontends."""

import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.adapters.names import ServedNames
from tandem.cluster.adapters.values import Adapter
from tandem.cluster.errors import InvalidRequest
from tandem.cluster.keys.key_cells import Sum
from tandem.cluster.protocol import MAX_MESSAGES, TOKEN_IDS_ONLY
from tandem.cluster.requests.cache_salt import worker_salt
from tandem.cluster.requests.default_sampling import with_defaults
from tandem.cluster.requests.model_limits import ModelLimits
from tandem.cluster.requests.origin import current_origin
from tandem.cluster.requests.reading.received import Received, read_resume
from tandem.cluster.text.chat_template import CHOSEN, ChatTemplateError
from tandem.cluster.text.encoder_prompt import InvalidHalf, decoder_prompt, take_encoder_prompt
from tandem.cluster.text.prompt_tokens import prompt_tokens, template_variables
from tandem.cluster.text.tokenizer import Tokenizer, TokenizerFailed
from tandem.proto import inference_pb2
from tandem.workers.errors import InvalidCall
from tandem.workers.sampling.sampling_params import (
    FIRST_TOKEN_SECONDS,
    MAX_ANSWERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MIN_FIRST_TOKEN_SECONDS,
    SEED_LIMIT,
    SamplingParams,
    validate,
)
from tandem.workers.wire.messages import PROMPT_DTYPE, prompt_from_bytes, sampling_from_proto
from tandem.workers.wire.prompt_spec import NO_ENCODER, EncoderPrompt, PromptSpec

TIERS = ("priority", "flex")  # values of service_tier: the first priority, and the last
MAX_REQUEST_ID = 128
QUICK_TEXT = 16_384  # bytes; longer prompts are tokenized in a separate process
QUICK_MESSAGES = 64
QUICK_IDS = 1 << 16  # numbers of token_ids
MOST_STOPS = (("stop", MAX_STOP_STRINGS), ("stop_token_ids", MAX_STOP_TOKEN_IDS))


@dataclass(frozen=True, eq=False)
class ValidRequest:
    """A request whose answers workers can run. params has a seed, so that a replay samples the same tokens."""

    request_id: str
    prompt: PromptSpec
    params: SamplingParams
    received: tuple[Received, ...] = ()  # of each answer that the client gets; empty without an earlier call
    resumes: bool = False
    returns_prompt: bool = False  # the client gets the prompt's token ids
    adapter: str = ""  # the name of the LoRA adapter that answers; empty for the model itself

    def answer(self, index: int) -> "ValidRequest":
        """Returns one answer as a request of its own. As in vLLM, its seed is the request's plus its index."""
        params = self.params
        if params.num_answers == 1:
            return self
        ranked = params.num_answers > params.n
        one = replace(
            params,
            n=1,
            best_of=None,
            seed=None if params.seed is None else (params.seed + index) % SEED_LIMIT,
            logprobs=params.logprobs or 0 if ranked else params.logprobs,
            prompt_logprobs=None if index else params.prompt_logprobs,  # the prompt is the same
        )
        received = () if ranked else self.received[index : index + 1]
        return replace(self, params=one, received=tuple(known for known in received if known.token_ids))


class RequestValidator:
    """Turns GenerateRequest messages into ValidRequests; InvalidRequest names the field, the value and the limit."""

    def __init__(
        self,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        *,
        salt_by_token: bool = False,
        defaults: Mapping[str, float] = MappingProxyType({}),
        names: ServedNames | None = None,
    ) -> None:
        """salt_by_token: callers with different credentials share no prefixes. defaults: see default_sampling(). names:
        the names that a request may give as its model; None: any, for the one model."""
        self._defaults = defaults
        self._names = names
        self._limits = limits
        self._salt_by_token = salt_by_token
        self._tokenizer = tokenizer
        self._longest_token = 0 if tokenizer is None else tokenizer.longest_token

    @property
    def vocab_size(self) -> int:
        return self._limits.vocab_size

    def check(self, message: inference_pb2.GenerateRequest) -> None:
        """Checks everything that needs no tokenized prompt and no look at each part. Raises InvalidRequest.

        The model's context bounds the size of a request that passes.
        """
        if len(message.request_id) > MAX_REQUEST_ID:
            raise InvalidRequest(
                f"request_id has {len(message.request_id)} characters; it may have at most {MAX_REQUEST_ID}"
            )
        for name, most in MOST_STOPS:
            if len(getattr(message.sampling, name)) > most:
                count = len(getattr(message.sampling, name))
                raise InvalidRequest(f"sampling.{name} has {count} entries; it may have at most {most}")
        target = message.sampling.first_token_seconds
        if message.sampling.HasField("first_token_seconds") and not target >= MIN_FIRST_TOKEN_SECONDS:
            raise InvalidRequest(f"sampling.first_token_seconds is {target:g}; it must be {FIRST_TOKEN_SECONDS}")
        self._check_priority(message)
        self._adapter(message)
        slides = message.sampling.HasField("sliding")
        self._check_received("resume.token_ids", len(message.resume.token_ids), slides=slides)
        for index, answer in enumerate(message.resume.answers[:MAX_ANSWERS]):
            self._check_received(f"resume.answers[{index}].token_ids", len(answer.token_ids), slides=slides)
        kept = message.truncate_prompt_tokens
        if message.HasField("truncate_prompt_tokens") and kept < 1 and kept != -1:
            raise InvalidRequest(f"truncate_prompt_tokens is {kept}; it must be at least 1, or -1 for as many as fit")
        try:
            take_encoder_prompt(message, has_encoder=self._limits.max_encoder_tokens > 0)
        except InvalidHalf as error:
            raise InvalidRequest(str(error)) from error
        kind = message.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("input is missing; set text, token_ids, token_bytes, chat or fork")
        if kind == "fork":
            self._check_fork(message)
        elif kind in ("token_ids", "token_bytes"):
            ids = (
                len(message.token_ids.ids) if kind == "token_ids" else len(message.token_bytes) // PROMPT_DTYPE.itemsize
            )
            if not message.HasField("truncate_prompt_tokens"):
                self._check_ids(ids)
        else:
            self._check_text(kind, message)

    def _check_fork(self, message: inference_pb2.GenerateRequest) -> None:
        if not message.fork.request_id:
            raise InvalidRequest("fork.request_id is empty; it must be the id of the request that is forked")
        if self._limits.max_encoder_tokens:
            raise InvalidRequest("fork is set; the model has an encoder, whose prompt comes whole")
        for name in ("resume", "truncate_prompt_tokens"):
            if message.HasField(name):
                raise InvalidRequest(f"{name} and fork are both set; send these tokens as token_ids")
        self._limits.check_length(len(message.fork.token_ids) + 1, 1)

    def _check_priority(self, message: inference_pb2.GenerateRequest) -> None:
        if message.sampling.HasField("priority"):
            self.check_priority("sampling.priority", message.sampling.priority)
        if message.service_tier and message.sampling.HasField("priority"):
            raise InvalidRequest(
                f"service_tier is {message.service_tier!r:.80}; leave it out when sampling.priority is set"
            )

    def _check_ids(self, count: int) -> None:
        if self._limits.max_encoder_tokens:
            self._limits.check_encoder(count)
        else:
            self._limits.check_length(count, 1)

    def is_long(self, message: inference_pb2.GenerateRequest) -> bool:
        """Returns whether prompt_tokens() takes long for a message that passes check()."""
        return (
            len(message.text) > QUICK_TEXT
            or len(message.chat.messages) > QUICK_MESSAGES
            or message.chat.ByteSize() > QUICK_TEXT
            or len(message.token_ids.ids) > QUICK_IDS
        )

    def check_priority(self, field: str, priority: int) -> None:
        """Raises InvalidRequest for a priority that this task's caller may not ask for."""
        access = current_origin.get().access
        first, last = access.priorities(*self._limits.priorities)
        if not first <= priority <= last:
            access.refused(Sum.REFUSED_PRIORITY)
            whose = f"the key {access.name!r}" if access.name else "gateway.priorities"
            raise InvalidRequest(f"{field} is {priority}; it must be from {first} to {last} ({whose})")

    def priority(self, service_tier: str, otherwise: int) -> int:
        """Returns the priority of a tier. If the tier is empty: `otherwise`, or the nearest that this task's caller may
        have."""
        first, last = current_origin.get().access.priorities(*self._limits.priorities)
        tiers: dict[str, int] = dict(zip(TIERS, (first, last), strict=True))
        return tiers.get(service_tier, max(first, min(otherwise, last)))

    def salt(self, cache_salt: str, credential: str) -> bytes:
        """Returns the salt by which workers share prefixes. Raises InvalidRequest."""
        return worker_salt(cache_salt, credential if self._salt_by_token else "")

    def most_kept(self, message: inference_pb2.GenerateRequest) -> int | None:
        """Returns how many of the prompt's last tokens are kept at most; None if it is not truncated."""
        if not message.HasField("truncate_prompt_tokens"):
            return None
        return message.truncate_prompt_tokens if message.truncate_prompt_tokens > 0 else self._limits.longest

    def validate(
        self,
        message: inference_pb2.GenerateRequest,
        open_ended: int | None = None,
        credential: str = "",
        tokens: Int64Array | None = None,
    ) -> ValidRequest:
        """open_ended: max_tokens of a request that sets none, or as many as there is room for; None: the default of
        SamplingParams. credential: what the caller showed to be let in, empty for nothing. tokens: the prompt's, int64
        [n], if they are known."""
        self.check(message)
        adapter = self._adapter(message)
        params = with_defaults(sampling_from_proto(message.sampling), message.sampling, self._defaults)
        ends_anywhere = open_ended is not None and not message.sampling.HasField("max_tokens")
        if ends_anywhere:
            params = replace(params, max_tokens=max(params.max_tokens, params.min_tokens))
        self._check_sampling(params)
        if params.bad_words:
            params = replace(params, bad_words=(), bad_words_ids=params.bad_words_ids + self._bad_words(params))
            self._check_sampling(params)
        if params.stop and self._tokenizer is None:
            raise InvalidRequest("sampling.stop: stop strings need a tokenizer, and the checkpoint has none")
        kept = self._kept(message, params, open_ended if ends_anywhere else None)
        token_ids, encoder = self._prompt(message, tokens, kept), NO_ENCODER
        if self._limits.max_encoder_tokens:
            if params.prompt_logprobs is not None:
                raise InvalidRequest("sampling.prompt_logprobs is set; a model with an encoder has none to report")
            token_ids, encoder = self._join(token_ids, message)
        params = replace(params, priority=self.priority(message.service_tier, params.priority))
        salt, priority = self.salt(message.cache_salt, credential), params.priority
        digest = b"" if adapter is None else adapter.digest
        prompt = PromptSpec(token_ids, salt, encoder, params.sliding, priority=priority, adapter=digest)
        if open_ended is not None and ends_anywhere:
            most = min(open_ended, self._limits.room(prompt))
            params = replace(params, max_tokens=max(1, params.min_tokens, most))
        if params.guided is not None:
            params = replace(params, guided=params.guided.within(params.max_tokens))
        self._limits.check(prompt, params.max_tokens)
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        resumes = message.HasField("resume")
        if resumes and not message.request_id:
            raise InvalidRequest("request_id is empty; resume needs the id of the request that it continues")
        received = read_resume(message, params, adapter, self._check_vocabulary)
        request_id, tells = message.request_id or uuid.uuid4().hex, message.return_prompt_token_ids
        going_on = [len(answer.token_ids) for answer in received if answer.token_ids and not answer.ended]
        if not all(map(prompt.fits_window, going_on)):
            raise InvalidRequest(
                "resume: sampling.sliding has let go of tokens that would have to be computed again; only a request "
                f"whose prompt and tokens fit in the window of {params.sliding} can be resumed"
            )
        name = "" if adapter is None else adapter.name
        return ValidRequest(request_id, prompt, params, received, resumes, tells, name)

    def _adapter(self, message: inference_pb2.GenerateRequest) -> Adapter | None:
        """Returns the adapter. Raises UnknownModel for a model that is not served, or not to this task's caller."""
        return self.adapter(message.model)

    def adapter(self, model: str) -> Adapter | None:
        """Returns what ServedNames.adapter() returns to this task's caller."""
        return None if self._names is None else self._names.adapter(model, current_origin.get().access.allows)

    def _check_received(self, field: str, count: int, *, slides: bool) -> None:
        longest = self._limits.max_sliding_tokens if slides else self._limits.longest
        if count >= longest:
            raise InvalidRequest(f"{field} has {count} ids; it may have at most {longest - 1}")

    def _check_sampling(self, params: SamplingParams) -> None:
        try:
            validate(params, self._limits.vocab_size)
        except ValueError as error:
            raise InvalidRequest(f"sampling.{error}") from error

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Returns the token ids of texts as they are, and with a space before them if that changes the first token, as
        in vLLM."""
        if self._tokenizer is None:
            raise InvalidRequest("sampling.bad_words: texts need a tokenizer, and the checkpoint has none")
        words: list[tuple[int, ...]] = []
        for text in params.bad_words:
            bare, spaced = (
                tuple(self._tokenizer.encode(space + text.lstrip(), add_special_tokens=False)) for space in ("", " ")
            )
            self._check_vocabulary("sampling.bad_words", np.array(bare, np.int64), of_text=True)
            words += [bare] if bare else []
            if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
                words.append(spaced)
        return tuple(words)

    def _check_text(self, kind: str, message: inference_pb2.GenerateRequest) -> None:
        if self._tokenizer is None:
            raise InvalidRequest(f"{kind}: {TOKEN_IDS_ONLY}")
        if kind == "text" and not message.text:
            raise InvalidRequest("text is empty; at least one token is needed")
        if len(message.chat.messages) > MAX_MESSAGES:
            raise InvalidRequest(f"chat has {len(message.chat.messages)} messages; it may have at most {MAX_MESSAGES}")
        if message.chat.continue_final_message and message.chat.add_generation_prompt:
            raise InvalidRequest("chat.add_generation_prompt is true; with continue_final_message it must be false")
        if message.chat.template_kwargs:
            try:
                variables = template_variables(message.chat)
                if variables.get(CHOSEN) is not None:
                    self._tokenizer.chat_templates.check(variables[CHOSEN])
            except ChatTemplateError as error:
                raise InvalidRequest(f"chat.{error}") from None
        size = len(message.text) or message.chat.ByteSize()
        most = self._limits.max_model_len * self._longest_token
        if kind == "chat" and size > most:  # which counts more than the characters
            size = len(message.chat.tools) + sum(
                len(turn.role) + len(turn.content) + len(turn.fields) for turn in message.chat.messages
            )
        # Checked before tokenizing, which takes seconds for millions of characters.
        if size > most and not message.HasField("truncate_prompt_tokens"):
            raise InvalidRequest(
                f"{kind} has {size} characters; it may have at most {most}, which {self._limits.max_model_len} of the "
                "model's longest tokens would make"
            )

    def _kept(
        self, message: inference_pb2.GenerateRequest, params: SamplingParams, open_ended: int | None
    ) -> int | None:
        """Returns how many tokens of a prompt are kept; None keeps all. open_ended: None if max_tokens is set.
        Otherwise the prompt leaves it half of the context, if it may be so long."""
        if not message.HasField("truncate_prompt_tokens"):
            return None
        if message.truncate_prompt_tokens > 0:
            return message.truncate_prompt_tokens
        longest, switch = self._limits.longest, self._limits.rope_switch
        if params.sliding is not None:
            return max(1, self._limits.longest_before(params.sliding))
        output = params.max_tokens if open_ended is None else max(params.min_tokens, min(open_ended, longest // 2))
        fits = longest - max(1, output)
        if switch is not None and fits <= switch < fits + output - 1:
            fits = switch + 1 - output
        return max(1, fits)

    def _prompt(
        self, message: inference_pb2.GenerateRequest, tokens: Int64Array | None, kept: int | None
    ) -> Int64Array:
        kind = str(message.WhichOneof("input"))
        try:
            if tokens is not None:
                token_ids = tokens
            elif kind == "token_bytes":
                token_ids = prompt_from_bytes(message.token_bytes, kind)
            else:
                token_ids = prompt_tokens(self._tokenizer, message)
        except (ChatTemplateError, TokenizerFailed) as error:
            raise refused_prompt(message, error) from error
        except InvalidCall as error:
            raise InvalidRequest(str(error)) from error
        if not len(token_ids):
            name = "token_ids.ids" if kind == "token_ids" else kind
            raise InvalidRequest(f"{name} is empty; at least one token{' id' * (kind == 'token_ids')} is needed")
        if kind == "fork":
            self._check_vocabulary("fork.token_ids", np.array(message.fork.token_ids, np.int64))
        elif kind in ("token_ids", "token_bytes"):
            self._check_vocabulary("token_ids.ids" if kind == "token_ids" else kind, token_ids)
        token_ids = token_ids if kept is None else token_ids[max(0, len(token_ids) - kept) :].copy()  # without the rest
        self._check_vocabulary(kind, token_ids, of_text=True)
        return token_ids

    def _join(
        self, encoder_ids: Int64Array, message: inference_pb2.GenerateRequest
    ) -> tuple[Int64Array, EncoderPrompt]:
        """Joins the encoder's prompt, padded to whole pages, and the decoder's prompt."""
        limits = self._limits
        limits.check_encoder(len(encoder_ids))
        try:
            decoder_ids = decoder_prompt(message, self._tokenizer, limits.decoder_start_token_id)
        except InvalidHalf as error:
            raise InvalidRequest(str(error)) from error
        self._check_vocabulary("decoder_prompt", decoder_ids)
        size = limits.page_size
        encoder = EncoderPrompt(len(encoder_ids), -(-len(encoder_ids) // size) * size)
        padding = np.zeros(encoder.border - encoder.length, np.int64)
        return np.concatenate((encoder_ids, padding, decoder_ids)), encoder

    def _check_vocabulary(self, field: str, ids: Int64Array, *, of_text: bool = False) -> None:
        """Checks ids against the vocabulary, also the ids of a text: a tokenizer may have tokens that the model
        lacks."""
        vocab_size, largest = self._limits.vocab_size, int(ids.max(initial=0))
        if largest < vocab_size:
            return
        named = f"{field}[{int(ids.argmax())}] is {largest}"
        if of_text and self._tokenizer is not None:
            text = self._tokenizer.decode([largest], skip_special_tokens=False)
            named = f"{field} has {text!r:.80}, which is token {largest}"
        raise InvalidRequest(f"{named}; the vocabulary has {vocab_size} entries, 0 … {vocab_size - 1}")


def refused_prompt(message: inference_pb2.GenerateRequest, error: Exception) -> InvalidRequest:
    """Returns the refusal of a prompt on which the tokenizer or the chat template fails."""
    return InvalidRequest(f"{message.WhichOneof('input')}: {error}")

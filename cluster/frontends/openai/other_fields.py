"""Fields of a body that no request here has: which are refused, and which are ignored."""

import difflib
import json
import reprlib
import string
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from tandem.cluster.frontends.http.errors import HttpError

HARMLESS = frozenset(
    {
        "guided_decoding_backend",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "store",
        "user",
        "verbosity",
    }
)
"""Fields that change no answer here. They are taken with any value."""

ONLY: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "add_generation_prompt": (True,),
        "audio": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "custom_logit_processor": (),
        "documents": ([],),
        "do_sample": (True,),
        "early_stopping": (False,),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "include_reasoning": (True,),
        "input": (),
        "input_ids": (),
        "kv_transfer_params": ({},),
        "length_penalty": (1.0,),
        "logits_processors": ([],),
        "logprob_token_ids": (),
        "mcp_servers": ([],),
        "lora_path": (),
        "messages": (),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "no_repeat_ngram_size": (0,),
        "no_stop_trim": (False,),
        "parallel_tool_calls": (True, False),
        "num_beams": (1,),
        "prediction": (),
        "prompt": (),
        "prompt_embeds": (),
        "prompt_token_ids": (),
        "repetition_detection": (),
        "return_hidden_states": (False,),
        "separate_reasoning": (True,),
        "session_params": ({},),
        "stop_regex": ([],),
        "spaces_between_special_tokens": (True,),
        "structural_tag": (),
        "suffix": ("",),
        "thinking_token_budget": (-1,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_a": (0,),
        "truncate_prompt_tokens": (),
        "truncation_side": ("left",),
        "typical_p": (1.0,),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
        "web_search_options": (),
    }
)
"""Fields of OpenAI, vLLM and SGLang that would change the answer and are not supported, with the values that ask for
nothing. null always asks for nothing."""

OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "num_return_sequences": "n",
        "repeat_penalty": "repetition_penalty",
        "sampling_seed": "seed",
        "stop_sequences": "stop",
    }
)
"""Other servers' names for fields that some body has."""

NOTHING: Mapping[str, object] = MappingProxyType({"seed": -1, "logprobs": False})
"""Values of supported fields that stand for a missing field."""

IGNORED_HEADER = "x-tandem-ignored"
LONGEST_NAME = 80  # characters of an unknown field that an answer shows
MOST_NAMED = 16  # fields in the header
NEAR = 0.85  # of difflib's ratio; `max_token` and `maxTokens` are nearer to `max_tokens`
SAFE = frozenset(string.ascii_letters + string.digits + "_.-")


def take_out(values: dict[str, Any], known: Collection[str]) -> list[str]:
    """Removes all fields but the known ones, and returns which are ignored. Raises HttpError for a field that may not
    be ignored."""
    for name, nothing in NOTHING.items():
        if name in values and values[name] == nothing and type(values[name]) is type(nothing):
            del values[name]
    ignored = []
    for name in [name for name in values if name not in known]:
        value = values.pop(name)
        if name in HARMLESS or value is None:
            continue
        if name in ONLY:
            _check_unsupported(name, value)
        else:
            _check_spelling(name, known)
            ignored.append(name)
    return ignored


def ignored_header(names: list[str]) -> dict[str, str]:
    """Returns the header that lists ignored fields; empty for none. Characters that names cannot have become `?`."""
    shown = ["".join(c if c in SAFE else "?" for c in name[:LONGEST_NAME]) for name in names[:MOST_NAMED]]
    more = [f"and {len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return {IGNORED_HEADER: ", ".join(shown + more)} if names else {}


def _check_unsupported(name: str, value: object) -> None:
    accepted = ONLY[name]
    if value is not None and value not in accepted:
        values = " or ".join(map(json.dumps, [*accepted, None]))
        raise HttpError(400, f"{name} is {reprlib.repr(value)}; here it must be {values}", param=name)


def _check_spelling(name: str, known: Collection[str]) -> None:
    """Refuses a field whose name is almost a known one: it is a mistake, not another server's field."""
    shown = name[:LONGEST_NAME]
    other = [OTHER_NAMES[name]] if OTHER_NAMES.get(name) in known else []
    near = other or difflib.get_close_matches(shown.lower(), known, n=1, cutoff=NEAR)
    if near:
        reason = f"unknown parameter {shown}; did you mean {near[0]}? known: {', '.join(known)}"
        raise HttpError(400, reason, param=shown, code="unknown_parameter")

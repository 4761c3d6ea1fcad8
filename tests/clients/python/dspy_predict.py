"""dspy: a prediction through the JSON adapter, whose answer follows a schema, and a plain call."""

from typing import Literal

import dspy
import litellm
from steps import API_KEY, BASE_URL, MODEL, check, run

# litellm knows by name which models follow schemas.
ABLE = {"litellm_provider": "openai", "mode": "chat", "supports_response_schema": True}
litellm.register_model({f"openai/{MODEL}": ABLE})
COMMON = {"api_base": BASE_URL, "api_key": API_KEY, "temperature": 0.0, "max_tokens": 600, "cache": False}
model = dspy.LM(f"openai/{MODEL}", **COMMON)  # dspy's own engine
by_litellm = dspy.LM(f"openai/{MODEL}", engine="litellm", **COMMON)


class Sort(dspy.Signature):
    """Sort a thing by its size."""

    thing: str = dspy.InputField()
    size: Literal["small", "large"] = dspy.OutputField()
    is_fast: bool = dspy.OutputField()


def a_call() -> None:
    for calling in (model, by_litellm):
        (text,) = calling("What is a cache?", max_tokens=16)
        check(text, "a text", text)
        texts = calling("What is a cache?", max_tokens=16, n=2, temperature=1.0)
        check(len(texts) == 2, "two texts", texts)


def a_prediction() -> None:
    with dspy.context(lm=by_litellm, adapter=dspy.JSONAdapter()):
        said = dspy.Predict(Sort)(thing="a cache")
    check(said.size in ("small", "large") and isinstance(said.is_fast, bool), "fields of their types", said)


if __name__ == "__main__":
    run(a_call, a_prediction)

"""litellm: the provider `anthropic`, over messages."""

import litellm
from steps import API_KEY, CHAT, HTTP, MODEL, check, run

ASKED = {"model": f"anthropic/{MODEL}", "messages": CHAT, "api_base": HTTP, "api_key": API_KEY, "max_tokens": 16}
GREEDY = {**ASKED, "temperature": 0}


def a_chat() -> None:
    whole = litellm.completion(**GREEDY)
    check(whole.choices[0].message.content and whole.usage.completion_tokens > 0, "a text with usage", whole)


def a_stream() -> None:
    text = litellm.completion(**GREEDY).choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**GREEDY, stream=True))
    check(streamed == text, "a stream says the same", streamed, text)


if __name__ == "__main__":
    run(a_chat, a_stream)

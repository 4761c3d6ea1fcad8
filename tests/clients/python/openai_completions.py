"""openai-python: completions, their log-probabilities and echoes, and models."""

import asyncio

import openai
from steps import API_KEY, BASE_URL, MODEL, PROMPT, check, refused, run

client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
GREEDY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}


def models() -> None:
    listed = client.models.list()
    check([model.id for model in listed] == [MODEL], "the served model", listed)
    check(client.models.retrieve(MODEL).object == "model", "one model")
    with refused(openai.NotFoundError, code="model_not_found"):
        client.models.retrieve("another")
    with refused(openai.AuthenticationError):
        openai.OpenAI(base_url=BASE_URL, api_key="wrong", max_retries=0).models.list()


def a_completion() -> None:
    whole = client.completions.create(**GREEDY)
    check(whole.object == "text_completion" and whole.choices[0].text, "a text", whole)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**GREEDY, stream=True))
    check(streamed == whole.choices[0].text, "a stream says the same", streamed, whole)

    async def call() -> str:
        async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY) as client:
            return (await client.completions.create(**GREEDY)).choices[0].text

    check(asyncio.run(call()) == streamed, "an asynchronous call says the same")


def several_prompts() -> None:
    whole = client.completions.create(**GREEDY | {"prompt": [PROMPT, "A function"], "n": 2})
    check([choice.index for choice in whole.choices] == [0, 1, 2, 3], "two answers to each", whole)
    by_ids = client.completions.create(**GREEDY | {"prompt": [[5, 6, 7], [8, 9]]})
    check(len(by_ids.choices) == 2, "lists of token ids", by_ids)
    check(client.completions.create(**GREEDY | {"prompt": [5, 6, 7]}).choices, "token ids")


def an_echo() -> None:
    (choice,) = client.completions.create(**GREEDY, echo=True, logprobs=2).choices
    logprobs = choice.logprobs
    check(choice.text.startswith(PROMPT), "the prompt first", choice.text)
    shown = "".join(logprobs.tokens)
    check(shown.endswith(choice.text), "tokens make the text, behind the model's first token", shown, choice.text)
    check(logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None, "none for the first", logprobs)
    check(all(value <= 0 for value in logprobs.token_logprobs[1:]), "log-probabilities", logprobs)
    check(logprobs.text_offset[0] == 0, "offsets", logprobs.text_offset)


def an_echo_alone() -> None:
    """Scores a text as evaluations do: no token is generated."""
    (choice,) = client.completions.create(**GREEDY | {"max_tokens": 0}, echo=True, logprobs=1).choices
    check(choice.text == PROMPT, "the prompt alone", choice.text)
    check(len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs), "one for each token", choice)


def log_probabilities() -> None:
    (choice,) = client.completions.create(**GREEDY, logprobs=3).choices
    check("".join(choice.logprobs.tokens) == choice.text, "tokens make the text", choice)
    check(all(len(top) >= 3 for top in choice.logprobs.top_logprobs), "alternatives", choice.logprobs)


def other_parameters() -> None:
    options = {"best_of": 2, "stop": "\n", "seed": 1, "suffix": None, "frequency_penalty": 0.1, "logit_bias": {"5": -1}}
    check(client.completions.create(**GREEDY | {"temperature": 0.5}, **options).choices, "a choice")
    with refused(openai.BadRequestError, param="suffix"):
        client.completions.create(**GREEDY, suffix="the end")
    with refused(openai.BadRequestError, param="max_tokens"):
        client.completions.create(**GREEDY | {"max_tokens": -1})


if __name__ == "__main__":
    run(models, a_completion, several_prompts, an_echo, an_echo_alone, log_probabilities, other_parameters)

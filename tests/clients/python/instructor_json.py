"""instructor: objects by JSON_SCHEMA mode, whole, streamed by parts and as a list."""

from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict
from steps import API_KEY, BASE_URL, CHAT, MODEL, check, run

ASKED = {"model": MODEL, "messages": CHAT, "max_tokens": 600, "temperature": 0, "max_retries": 0}
client = instructor.from_openai(
    openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0), mode=instructor.Mode.JSON_SCHEMA
)


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: Literal["small", "large"]
    is_fast: bool


def an_object() -> None:
    said = client.chat.completions.create(response_model=Answer, **ASKED)
    check(isinstance(said, Answer), "an object of the class", said)
    said, whole = client.chat.completions.create_with_completion(response_model=Answer, **ASKED)
    check(whole.choices[0].finish_reason == "stop", "the answer beside it", whole)


def parts_of_an_object() -> None:
    *_, last = client.chat.completions.create_partial(response_model=Answer, **ASKED)
    check(last.size in ("small", "large"), "the last part is whole", last)


if __name__ == "__main__":
    run(an_object, parts_of_an_object)

"""instructor: objects by TOOLS mode, whole and streamed by parts."""

from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict
from steps import API_KEY, BASE_URL, CHAT, MODEL, check, run

ASKED = {"model": MODEL, "messages": CHAT, "max_tokens": 600, "temperature": 0, "max_retries": 0}
inner = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
client = instructor.from_openai(inner, mode=instructor.Mode.TOOLS)


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: Literal["small", "large"]
    is_fast: bool


def an_object() -> None:
    said = client.chat.completions.create(response_model=Answer, **ASKED)
    check(isinstance(said, Answer), "an object of the class", said)


def parts_of_an_object() -> None:
    *_, last = client.chat.completions.create_partial(response_model=Answer, **ASKED)
    check(last.size in ("small", "large"), "the last part is whole", last)


def strict_tools() -> None:
    strict = instructor.from_openai(inner, mode=instructor.Mode.TOOLS_STRICT)
    said = strict.chat.completions.create(response_model=Answer, **ASKED)
    check(isinstance(said, Answer), "an object of the class", said)


if __name__ == "__main__":
    run(an_object, parts_of_an_object, strict_tools)

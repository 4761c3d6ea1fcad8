"""openai-agents: an agent that calls one tool and then answers, over responses, which it takes by default."""

from agents import OpenAIResponsesModel
from agents_tool import checked
from steps import run


def a_run_over_responses() -> None:
    checked(OpenAIResponsesModel)


if __name__ == "__main__":
    run(a_run_over_responses)

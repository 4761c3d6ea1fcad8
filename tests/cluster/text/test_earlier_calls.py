"""Earlier calls of a conversation whose arguments are empty, cut off or no object: templates take them all the same."""

import json

import pytest

from tandem.cluster.text.chat_template import ChatTemplate

ALL = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"
ITEMS = f"{ALL}{{% for k, v in c.function.arguments.items() %}}[{{{{ k }}}}={{{{ v }}}}]{{% endfor %}}{END}"
FILTER = f"{ALL}{{% for k, v in c.function.arguments|items %}}[{{{{ k }}}}={{{{ v }}}}]{{% endfor %}}{END}"
TEXT = f"{ALL}{{{{ '(' + c.function.arguments + ')' }}}}{END}"
EITHER = f"{ALL}{{% set a = c.function.arguments %}}({{{{ a if a is string else a | tojson }}}}){END}"
CUT = '{"a": "cut'


@pytest.mark.parametrize("arguments", ["", " ", "null", None, CUT, "[1]", '"x"', "5", "{" * 5000])
def test_a_conversation_goes_on_behind_arguments_that_are_no_object(arguments: str | None) -> None:
    calls = [{"function": {"name": "f", "arguments": text}} for text in (arguments, '{"b": 2}')]
    turns = [{"role": "assistant", "content": "", "tool_calls": calls}]
    text = "{}" if arguments in ("", " ", "null", None) else arguments
    for source, said in (
        (ITEMS, "[b=2]"),
        (FILTER, "[b=2]"),
        (TEXT, f'({text})({{"b": 2}})'),
        (EITHER, f'({text})({{"b": 2}})'),
    ):
        assert ChatTemplate(source, {}).render(turns) == said


def test_an_object_stays_one() -> None:
    value = {"a": [1, None, "é"]}
    turns = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": json.dumps(value)}}]}]
    assert ChatTemplate(ITEMS, {}).render(turns) == "[a=[1, None, 'é']]"
    assert json.loads(ChatTemplate(TEXT, {}).render(turns)[1:-1]) == value

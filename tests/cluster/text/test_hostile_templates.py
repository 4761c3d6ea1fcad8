"""Chat templates of a stranger: each ends with an error, within the time and memory that one rendering may take."""

import resource

import pytest

from tandem.cluster.text.chat_template import ChatTemplate, ChatTemplateError
from tandem.workers.checkpoint.errors import InvalidTokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def loop(body: str, times: int, begin: str) -> str:
    return (
        f"{{% set ns = namespace(s={begin}) %}}{{% for i in range({times}) %}}{{% set ns.s = {body} %}}{{% endfor %}}"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "nested too deeply"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "nested too deeply"),
        ("{{ " + "1+" * 20_000 + "1 }}", "nested too deeply"),
        ("{% for a in messages %}" * 60 + "{% endfor %}" * 60, "too many statically nested blocks"),
        ("{{ " + "9" * 5000 + " }}", r"Exceeds the limit \(4300 digits\)"),
        ("x" * 2_000_000, "the chat template has 2000000 characters; at most 1048576 do"),
    ],
)
def test_templates_that_cannot_be_compiled(source: str, message: str) -> None:
    with pytest.raises(InvalidTokenizer, match=message):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(10**9) %}{% endfor %}", "given 1.000e.09"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "runs for more than 2 s"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
        ("{{ 'a'|center(2000000000) }}", "center is given 2.000e.09; at most 1048576"),
        ("{{ 'a'.ljust(2000000000) }}", "ljust is given"),
        ("{{ '%2000000000d'|format(1) }}", "format has a width of more than six digits"),
        ("{{ '%2000000000d' % 1 }}", "% has a width of more than six digits"),
        ("{{ '{:>2000000000}'.format(1) }}", "format has a width of more than six digits"),
        ("{{ ('a\n' * 1000000)|indent(1000000) }}", "would make"),
        ("{{ [1]|batch(1000000000, 'x')|list|length }}", "batch is given"),
        ("{{ range(99999)|map('string')|map('center', 10000)|join|length }}", "makes more than|runs for more than"),
        ("{{ messages|tojson(indent=1000000) }}", "indent of tojson is 1000000; it must be at most 64"),
        (loop("ns.s.replace('a', 'aaaaaaaaaa')", 12, "'aaaaaaaaaa'") + "{{ ns.s|length }}", "replace would make"),
        (loop("ns.s ~ ns.s", 34, "'a'") + "{{ ns.s|length }}", "makes more than"),
        (loop("ns.s + ns.s", 34, "[1]") + "{{ ns.s|length }}", "makes more than"),
        (loop("[ns.s, ns.s]", 34, "[1]") + "{{ ns.s }}", "has more than 65536 lists"),
        (loop("[ns.s, ns.s]", 34, "[1]") + "{{ ns.s|tojson|length }}", "has more than 65536 lists"),
        ("{% for a in range(99999) %}{{ 'a' * 1000000 }}{% endfor %}", "makes more than"),
        ("{% set s = 'a' * 1000000 %}{% macro m() %}" + "{{ s }}" * 300 + "{% endmacro %}{{ m() }}", "makes more than"),
        ("{{ ('a' * 1000000).translate({97: 'a' * 1000000}) }}", "translate is not allowed"),
    ],
)
def test_templates_that_ask_for_time_or_memory(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "runs for more than" not in message:  # on a busy machine the time may be over before the memory
        monkeypatch.setattr("tandem.cluster.text.chat_template.RENDER_SECONDS", 60.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, {}).render(MESSAGES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


def test_a_long_prompt_is_rendered_as_often_as_one_likes() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role ~ ': ' + m['content'].strip() }}\n{% endfor %}", {})
    for _ in range(20):
        assert len(template.render([{"role": "user", "content": "long " * 400_000}])) > 1_900_000

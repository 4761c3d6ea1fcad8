"""Whether the page of the API names each field of bodies and each sampling parameter, in a row of its tables."""

import re

import pytest

from tandem.cluster.frontends.anthropic.body import MessagesBody
from tandem.cluster.frontends.openai.chats import ChatBody
from tandem.cluster.frontends.openai.completions import CompletionBody
from tandem.cluster.frontends.openai.other_fields import HARMLESS, ONLY
from tandem.cluster.frontends.openai.part import Part
from tandem.cluster.frontends.responses.body import ResponsesBody
from tandem.proto import inference_pb2
from tests.test_docs import ROOT

PAGE = (ROOT / "docs/http-and-grpc.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`(\w+)`", PAGE))
ROWS = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
BODIES = {"completion": set(CompletionBody.model_fields), "chat": set(ChatBody.model_fields)}


@pytest.mark.parametrize("fields", [*BODIES.values(), {*inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name}])
def test_each_field_has_a_row(fields: set[str]) -> None:
    assert fields - ROWS == set()


@pytest.mark.parametrize("body", [ResponsesBody, MessagesBody])
def test_the_fields_of_other_apis_are_named(body: type[Part]) -> None:
    assert set(body.model_fields) - NAMED == set()


def test_the_table_of_bodies_has_no_other_fields() -> None:
    table = PAGE.partition("### Fields of bodies")[2].partition("## Errors")[0]
    rows = re.findall(r"^\| `(\w+)` \| (both|chat|completion) \|", table, re.MULTILINE)
    assert len(rows) > 20
    for name, kind in rows:
        for body, fields in BODIES.items():
            assert (name in fields) or kind not in (body, "both"), (name, body)


def test_no_field_is_both_taken_and_left_out() -> None:
    assert HARMLESS & ONLY.keys() == set()
    assert HARMLESS & (BODIES["completion"] | BODIES["chat"]) == {"reasoning_effort"}, "which only a chat reads"

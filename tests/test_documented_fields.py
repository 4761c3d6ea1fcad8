"""Whether the page of the API names each field of bodies and each sampling parameter, in a row of its tables."""

import re

import pytest

from tandem.cluster.frontends.anthropic.body import MessagesBody
from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.frontends.openai.chats import ChatBody
from tandem.cluster.frontends.openai.completions import CompletionBody
from tandem.cluster.frontends.openai.other_fields import HARMLESS, ONLY
from tandem.cluster.frontends.responses.body import ResponsesBody
from tandem.proto import inference_pb2
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.test_docs import ROOT

PAGE = (ROOT / "docs/http-and-grpc.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`(\w+)`", PAGE))
ROWS = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
WORDS = {"none": None, "drawn by the gateway": None, "`n`": None, "all": (), "true": True, "false": False}
BODIES = {"completion": set(CompletionBody.model_fields), "chat": set(ChatBody.model_fields)}


@pytest.mark.parametrize("fields", [*BODIES.values(), {*inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name}])
def test_each_field_has_a_row(fields: set[str]) -> None:
    assert fields - ROWS == set()


@pytest.mark.parametrize("body", [ResponsesBody, MessagesBody])
def test_the_fields_of_other_apis_are_named(body: type[BodyObject]) -> None:
    assert set(body.model_fields) - NAMED == set()


def test_the_table_of_bodies_has_no_other_fields() -> None:
    table = PAGE.partition("### Fields of bodies")[2].partition("## Errors")[0]
    rows = re.findall(r"^\| `(\w+)` \| (both|chat|completion) \|", table, re.MULTILINE)
    assert len(rows) > 20
    for name, kind in rows:
        for body, fields in BODIES.items():
            assert (name in fields) or kind not in (body, "both"), (name, body)


def test_defaults_of_sampling_parameters() -> None:
    table = PAGE.partition("### Sampling parameters")[2].partition("### Log-probabilities")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE))
    kept = {name: value for name, value in vars(SamplingParams()).items() if name in rows}
    assert len(kept) > 15
    for name, value in kept.items():
        said = WORDS.get(rows[name], rows[name])
        assert (said or None) == (value or None) or float(str(said)) == value, name


@pytest.mark.parametrize(("kind", "body"), [("completion", CompletionBody), ("chat", ChatBody)])
def test_defaults_of_bodies(kind: str, body: type[BodyObject]) -> None:
    """A default that a body has is the one that its row says; others are made where they act."""
    table = PAGE.partition("### Fields of bodies")[2].partition("### Tools and reasoning")[0]
    rows = re.findall(r"^\| `(\w+)` \| (both|chat|completion) \| (.+?) \|", table, re.MULTILINE)
    for name, where, said in rows:
        if where not in (kind, "both"):
            continue
        field = body.model_fields[name]
        assert field.is_required() == (said == "required"), name
        if isinstance(field.default, bool):
            assert said == str(field.default).lower(), name
        elif not field.is_required():
            assert field.default is None, name
            assert said not in ("required", "true", "false"), name


def test_no_field_is_both_taken_and_left_out() -> None:
    assert HARMLESS & ONLY.keys() == set()
    assert HARMLESS & (BODIES["completion"] | BODIES["chat"]) == {"reasoning_effort"}, "which only a chat reads"

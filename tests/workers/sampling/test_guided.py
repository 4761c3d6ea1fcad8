"""Random schemas, regexes and grammars: what their masks let be drawn from random logits is valid, also once more."""

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Inner

from tandem.cluster.frontends.openai.tool_fields import forced_schema
from tandem.cluster.text.parsers.output_parser import Calls
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.errors import ForwardFailed, InvalidCall
from tandem.workers.requests.guide_errors import guide_error
from tandem.workers.runner.eager_sampler import EagerSampler
from tandem.workers.sampling.closed_schema import closed
from tandem.workers.sampling.guided import MOST_CACHED, Grammars, Guided, InvalidGuide, masks_of
from tandem.workers.sampling.logit_rules import LogitRules
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.support.random_guides import KINDS, random_guide

VOCAB, EOS, ENOUGH = 512, 1, 600
PROGRAMS = 40  # tests.fuzz.guides runs 1,000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guided") / "model"
    make_checkpoint(folder, arch="qwen3", size="tiny", seed=1)
    return folder


NO_MORE = {"additionalProperties": False}


def draw(grammars: Grammars, guided: Guided, seed: int, again_at: int) -> list[int]:
    """Its tokens; the request is placed again after again_at of them."""
    rng, params, output = np.random.default_rng(seed), SamplingParams(guided=guided, seed=seed), list[int]()
    sampler = EagerSampler(torch.device("cpu"))
    batch, constraint = SampleBatch.from_params([]), None
    while EOS not in output and len(output) < ENOUGH:
        if constraint is None or len(output) == again_at:
            constraint = grammars.constraint(guided)
            constraint.follow(output)
            rules = LogitRules(params, frozenset((EOS,)), np.array([5, *output]), len(output), 1, guided=True)
            batch = SampleBatch.from_params([params], [rules])
        logits = torch.from_numpy(rng.normal(0, 2, (1, VOCAB)).astype(np.float32))
        masks = masks_of([constraint])
        token = int(sampler.sample(logits, batch, np.array([1 + len(output)]), masks).wait().token_ids[0])
        assert constraint.error is None
        constraint.follow((token,))
        output.append(token)
    return output


def test_a_token_that_the_grammar_forbids_is_a_fault_of_the_call(folder: Path) -> None:
    """A prefill worker that was told another grammar, or none, may have sampled it."""
    constraint = Grammars(folder, VOCAB, (EOS,)).constraint(Guided("regex", ("a{3}",)))
    constraint.follow((EOS,))
    assert (constraint.mask() == -1).all()
    error = guide_error(constraint)
    assert isinstance(error, InvalidCall)
    assert str(error).startswith("sampling.guided: the output cannot follow it: ")


def test_a_mask_that_does_not_come_is_a_fault_of_the_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = Grammars(folder, VOCAB, (EOS,)).constraint(Guided("regex", ("a{3}",)))
    monkeypatch.setattr("tandem.workers.sampling.guided.MASK_SECONDS", 0.0)
    blocked = threading.Event()
    monkeypatch.setattr(constraint, "_next_mask", lambda _: blocked.wait(60))
    try:
        assert (constraint.mask() == -1).all()
    finally:
        blocked.set()
    error = guide_error(constraint)
    assert isinstance(error, ForwardFailed)
    assert str(error) == "a mask could not be computed: TimeoutError"


@pytest.mark.parametrize("kind", KINDS)
def test_random_grammars(folder: Path, kind: str) -> None:
    tokenizer, grammars = Tokenizer.from_folder(folder), Grammars(folder, VOCAB, (EOS,))
    assert tokenizer is not None
    ended = 0
    for seed in range(PROGRAMS):
        guide = random_guide(kind, seed)
        output = draw(grammars, Guided(kind, (guide.content,)), seed, again_at=1 + seed % 30)
        if output[-1] != EOS:
            continue
        ended += 1
        assert guide.follows(tokenizer.decode(output[:-1], skip_special_tokens=False)), guide.content
    grammars.close()
    assert ended > 0.9 * PROGRAMS


def of_spaces(grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any]) -> str:
    """Returns the output of a model that likes spaces best."""
    *_, space = tokenizer.encode(" ")
    matcher, written = grammars.compile(Guided("json_schema", (json.dumps(schema),))), ""
    while not matcher.is_stopped() and len(written) < ENOUGH:
        mask = np.frombuffer(matcher.compute_bitmask(), np.int32)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
        token = space if allowed[space] else int(np.flatnonzero(allowed)[0])
        matcher.consume_tokens([token])
        written += tokenizer.decode([token]) if token != EOS else ""
    return written


PADS = [f"[PAD{number}]" for number in range(40)]


@pytest.mark.parametrize("added", [1, 40])
def test_a_tokenizer_may_have_more_ids_than_the_model(folder: Path, tmp_path: Path, added: int) -> None:
    """Also where a text is certain that the tokenizer would write in one of them."""
    inner = Inner.from_file(str(folder / "tokenizer.json"))
    inner.add_tokens(PADS[:added])
    inner.save(str(tmp_path / "tokenizer.json"))
    assert inner.get_vocab_size() == VOCAB + added
    grammars, guided = Grammars(tmp_path, VOCAB, (EOS,)), Guided("regex", (r"(\[PAD0\]|[A-P]+|\[PAD39\] and){1,3}",))
    outputs = [draw(grammars, guided, seed, again_at=1 + seed) for seed in range(8)]
    texts = {inner.decode(output[:-1]) for output in outputs if output[-1] == EOS}
    assert all(re.fullmatch(guided.texts[0], text) for text in texts)
    assert any("[PAD0]" in text for text in texts)
    grammars.close()


@pytest.mark.parametrize("vocab_size", [321, 352, 360, 600])
def test_no_id_is_allowed_that_model_or_tokenizer_lacks(folder: Path, vocab_size: int) -> None:
    """Here the model lacks ids of tokenizer.json's own vocabulary."""
    grammars = Grammars(folder, vocab_size, (EOS,))
    mask = grammars.constraint(Guided("regex", ("(.|\n)*",))).mask()
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
    whole = Grammars(folder, VOCAB, (EOS,)).compile(Guided("regex", ("(.|\n)*",))).compute_bitmask()
    expected = np.unpackbits(np.frombuffer(whole, np.uint8), bitorder="little").astype(bool)
    allowed = min(vocab_size, VOCAB)
    assert bits[:allowed].tolist() == expected[:allowed].tolist()
    assert not bits[allowed:].any()
    assert bits[200:allowed].any()
    grammars.close()


def test_a_grammar_that_only_tokens_beyond_the_model_follow_ends_the_request(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    text = next(text for text in map(tokenizer.token_text, range(320, VOCAB)) if text.strip().isalpha())
    (token,) = tokenizer.encode(text, add_special_tokens=False)
    constraint = Grammars(folder, token, (EOS,)).constraint(Guided("choice", (text,)))
    assert (constraint.mask() == -1).all()
    assert str(guide_error(constraint)).endswith("the model has no token that may come next")


def test_spaces_in_json_end(folder: Path) -> None:
    """One that asks for more of them by x-guidance gets them."""
    tokenizer, grammars = Tokenizer.from_folder(folder), Grammars(folder, VOCAB, (EOS,))
    assert tokenizer is not None
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], **NO_MORE}
    for more in ({}, {"x-guidance": {"lenient": True}}, {"$defs": {"x-guidance": {"whitespace_pattern": " +"}}}):
        written = of_spaces(grammars, tokenizer, schema | more)
        assert json.loads(written) == {"a": 7}
        assert max(map(len, re.findall(" +", written))) == 32
    assert of_spaces(grammars, tokenizer, schema | {"x-guidance": {"whitespace_pattern": " +"}}).strip() == "{"
    assert of_spaces(grammars, tokenizer, schema | {"x-guidance": {"whitespace_flexible": False}}) == '{"a":7}'
    grammars.close()


@pytest.mark.parametrize("own", [{}, {"x-guidance": {"whitespace_pattern": " +"}}])
def test_forced_calls_have_the_spaces_of_templates_and_no_others(folder: Path, own: dict[str, Any]) -> None:
    tokenizer, grammars = Tokenizer.from_folder(folder), Grammars(folder, VOCAB, (EOS,))
    assert tokenizer is not None
    lists = {"type": "array", "items": {"enum": [7, {"x": 1, "y": []}]}, "minItems": 3, "maxItems": 3}
    schema = {"type": "object", "properties": {"a": lists, "b": {"enum": [{}]}}, "required": ["a", "b"], **own}
    for calls in (Calls({"f": schema}, required=True, most=2), Calls({"f": schema}, named="f")):
        written = of_spaces(grammars, tokenizer, forced_schema(calls))
        assert written == json.dumps(json.loads(written))
    grammars.close()


OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {}}}
CLOSED = OPEN | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        (OPEN, CLOSED),
        (CLOSED | {"additionalProperties": True}, None),
        ({"properties": {"properties": OPEN, "enum": OPEN}}, {"properties": {"properties": CLOSED, "enum": CLOSED}}),
        ({"items": [OPEN], "enum": [OPEN]}, {"items": [CLOSED], "enum": [OPEN]}),
        ({"$defs": {"x": OPEN}, "anyOf": [OPEN, 5]}, {"$defs": {"x": CLOSED}, "anyOf": [CLOSED, 5]}),
        (OPEN | {"required": ["b"]}, None),
        (OPEN | {"patternProperties": {"^x": {}}}, None),
        ({"allOf": [OPEN, OPEN]}, None),
        ({"items": OPEN, "properties": {"a": {"$ref": "#"}}, "anyOf": [OPEN]}, None),
        (True, None),
    ],
)
def test_objects_have_the_properties_that_they_name(schema: Any, made: Any) -> None:
    if isinstance(made, dict) and "properties" in made and "type" not in made:
        made = made | {"additionalProperties": False}
    assert closed(schema) == (schema if made is None else made)


def test_a_schema_that_is_nested_too_deeply_is_refused(folder: Path) -> None:
    deep = '{"items":' * 20_000 + "{}" + "}" * 20_000
    with pytest.raises(InvalidGuide, match="json_schema cannot be read"):
        Grammars(folder, VOCAB, (EOS,)).compile(Guided("json_schema", (deep,)))


LARGE = "(?:(?:(?:a{50}){50}){50}){50}"
NO_TEXT = "no text follows it, such as where it refers to itself and never ends"
COMPLEX = "it is too complex"
ITSELF = '{"$ref": "#"}'
ROUND = json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}})
DOUBLED = {
    "$ref": "#/$defs/0",
    "$defs": {
        str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}, {"allOf": 2 * [{"$ref": f"#/$defs/{n + 1}"}]}]}
        for n in range(12)
    }
    | {"12": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", ITSELF, NO_TEXT),
        ("json_schema", ROUND, NO_TEXT),
        ("json_schema", '{"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}', NO_TEXT),
        ("json_schema", json.dumps(DOUBLED), COMPLEX),
        ("json_schema", '{"enum": []}', "Unsatisfiable schema"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum (5) is greater than maximum (3)"),
        ("json_schema", '{"type": "number", "multipleOf": 0}', "invalid multiple of"),
        ("json_schema", '{"type": "object", "patternProperties": {"^(?=a)": {}}}', "look-around"),
        ("json_schema", '{"$ref": "http://127.0.0.1:1/x"}', "does not fetch resources"),
        ("json_schema", "null", "it is null; an object, true and false are JSON schemas"),
        ("regex", r"[^\s\S]", NO_TEXT),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "(?:" * 3000 + "a" + "){2}" * 3000, "invalid regex"),
        ("regex", "|".join(rf"[\w{one}]{{1,64}}" for one in "!$%&/=?@#,;:<>"), COMPLEX),
        ("regex", LARGE, COMPLEX),
        ("regex", "a{1000000000}", COMPLEX),
        ("grammar", f"start: A\nA: /{LARGE}/", COMPLEX),
        (
            "json_schema",
            json.dumps({"type": "array", "items": {"type": "string", "pattern": f"^{LARGE}$"}, "minItems": 1}),
            COMPLEX,
        ),
        ("grammar", "start: start", NO_TEXT),
        ("grammar", "start: a\na: b\nb: a", NO_TEXT),
        ("grammar", "root ::= root", NO_TEXT),
        ("grammar", "start: A\nA: /a/ & /b/", NO_TEXT),
        ("grammar", f"start: %json {ITSELF}", NO_TEXT),
        ("grammar", "%import /etc/passwd\nstart: x", "Expected name"),
        ("grammar", " ", "No 'root' rule found"),
    ],
)
def test_what_no_text_follows_is_refused_in_our_words(folder: Path, kind: str, text: str, why: str) -> None:
    with pytest.raises(InvalidGuide) as caught:
        Grammars(folder, VOCAB, (EOS,)).check(Guided(kind, (text,)))
    said = str(caught.value)
    assert said.startswith(tuple(f"{kind} cannot be {done}: " for done in ("compiled", "read", "followed")))
    assert why in said
    assert not re.search("NoExtensionBias|non-verbose|\n|lark_grammar", said)
    assert len(said) < 400


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a{60000}"),
        ("json_schema", '{"type": "array", "minItems": 1000000000}'),
        ("json_schema", '{"type": "string", "minLength": 1000000000, "maxLength": 1000000000}'),
        ("json_schema", json.dumps({"type": "string", "pattern": LARGE})),
        ("json_schema", json.dumps({"enum": [f"value {number}" for number in range(3000)]})),
        ("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'),
        ("grammar", 'start: start "a" | "b"'),
        ("grammar", "%import common.WORD\nstart: WORD"),
    ],
)
def test_what_is_repeated_often_takes_little_memory(folder: Path, kind: str, text: str) -> None:
    """Its matcher is kept, here and by running requests; without a bound it takes 150 MiB."""
    grammars = Grammars(folder, VOCAB, (EOS,))
    before = resident_bytes()
    constraint = grammars.constraint(Guided(kind, (text,)))
    constraint.mask()
    assert constraint.error is None
    assert resident_bytes() - before < 80 << 20
    grammars.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_no_more_grammars_are_kept_than_said(folder: Path) -> None:
    grammars = Grammars(folder, VOCAB, (EOS,))
    for number in range(MOST_CACHED + 5):
        grammars.compile(Guided("regex", (f"a{{{number + 1}}}",)))
    assert len(grammars._compiled) == MOST_CACHED


def test_a_matcher_is_its_rows_own(folder: Path) -> None:
    grammars = Grammars(folder, VOCAB, (EOS,))
    first, second = (grammars.constraint(Guided("choice", ("yes", "no"))) for _ in range(2))
    before = second.mask()
    first.follow([int(np.flatnonzero(np.unpackbits(first.mask().view(np.uint8), bitorder="little"))[0])])
    assert (first.mask() != before).any()
    assert (second.mask() == before).all()
    grammars.close()


def test_a_checkpoint_without_a_tokenizer_or_an_end(folder: Path, tmp_path: Path) -> None:
    for grammars in (Grammars(tmp_path, VOCAB, (EOS,)), Grammars(folder, VOCAB, ())):
        with pytest.raises(InvalidGuide, match=r"need a tokenizer.json and an end token"):
            grammars.compile(Guided("regex", ("a",)))

"""Outputs that think before they follow a grammar: each mask, however the request is placed again."""

import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.sampling.guided import Constraint, Grammars, Guided
from tandem.workers.sampling.thinking import Thinking
from tests.support.random_guides import KINDS, random_guide

EOS, VOCAB = 1, 544
GUIDE = ("regex", ("[a-c]{2}",))
LIMIT, MOST = 12, 60


@pytest.fixture(scope="module", params=["no token", "a token", "a special token"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a checkpoint whose tokenizer has tags of each kind: <t> and </t>."""
    folder = tmp_path_factory.mktemp("thinking") / "model"
    make_checkpoint(folder, arch="qwen3", size="tiny", seed=1)
    path = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    if request.param != "no token":
        special = request.param == "a special token"
        tokenizer.add_tokens([tokenizers.AddedToken(tag, special=special) for tag in ("<t>", "</t>")])
    tokenizer.save(str(path))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Grammars:
    return Grammars(folder, VOCAB, (EOS,))


def guided(*, opened: bool, limit: int = LIMIT) -> Guided:
    return Guided(*GUIDE, Thinking("<t>", "</t>", opened), limit)


def allowed(constraint: Constraint) -> list[int]:
    bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
    assert constraint.error is None
    return np.nonzero(bits)[0].tolist()


def follows(constraint: Constraint, ids: list[int]) -> bool:
    """Whether each of the tokens may come next, and then the end."""
    for token in ids:
        if token not in allowed(constraint):
            return False
        constraint.follow((token,))
    return EOS in allowed(constraint)


def draw(grammars: Grammars, how: Guided, seed: int, again_at: int) -> list[int]:
    """Tokens drawn at random; the request is placed again after again_at of them."""
    rng, output, constraint = np.random.default_rng(seed), list[int](), grammars.constraint(how)
    while EOS not in output and len(output) < MOST:
        if len(output) == again_at:
            constraint = grammars.constraint(how)
            constraint.follow(output)
        output.append(int(rng.choice(allowed(constraint))))
        constraint.follow(output[-1:])
    return output


def test_the_grammar_begins_behind_the_last_tag(grammars: Grammars, tokenizer: tokenizers.Tokenizer) -> None:
    for text, opened, fits in (
        ("é <b> [ab]</t>ab", True, True),
        ("</t>ab", True, True),
        ("no </t or < /t></t>\n\nab", True, True),
        ("<t>Hm.</t>ab", False, True),
        ("<t></t>\nab", False, True),
        ("ab", False, True),
        ("ab", True, False),
        ("Hm.</t>xy", True, False),
        ("Hm.</t>ab", False, False),
        ("<t>ab", False, False),
    ):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert follows(grammars.constraint(guided(opened=opened, limit=0)), ids) == fits, text


@pytest.mark.parametrize("opened", [True, False])
def test_thinking_ends_behind_so_many_tokens_wherever_a_request_is_placed_again(
    grammars: Grammars, tokenizer: tokenizers.Tokenizer, opened: bool
) -> None:
    thought = 0
    for seed in range(40):
        how = guided(opened=opened)
        output = draw(grammars, how, seed, -1)
        assert output[-1] == EOS
        text = tokenizer.decode(output[:-1], skip_special_tokens=False)
        assert re.fullmatch(
            r"(<t>)?.*</t>\n{0,2}[a-c]{2}" if opened else r"(<t>.*</t>\n{0,2})?[a-c]{2}", text, re.DOTALL
        )
        thought += "</t>" in text
        end = len(tokenizer.encode("</t>", add_special_tokens=False).ids)
        assert len(output) <= LIMIT + 3 + end + 2 + 3  # a character, the tag, line ends and what follows the guide
        for again_at in range(0, len(output), 7):
            assert draw(grammars, how, seed, again_at) == output
    assert thought >= 2


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 60))])
def test_behind_the_last_tag_masks_are_those_of_the_guide(
    grammars: Grammars, tokenizer: tokenizers.Tokenizer, seed: int
) -> None:
    """Line ends at the beginning are excepted."""
    random_one = random_guide(KINDS[seed % len(KINDS)], seed)
    guide = Guided(random_one.kind, (random_one.content,))
    opened, rng = seed % 4 > 0, np.random.default_rng(seed)
    both = grammars.constraint(Guided(guide.kind, guide.texts, Thinking("<t>", "</t>", opened)))
    alone = grammars.constraint(guide)
    both.follow(tokenizer.encode(("" if opened else "<t>") + "Hm. {</t>", add_special_tokens=False).ids)
    for count in range(80):
        may, line_ends = allowed(alone), set[int]()
        if count == 0:
            line_ends = {token for token in allowed(both) if tokenizer.decode([token])[:1] == "\n"}
        assert set(allowed(both)) - line_ends == set(may) - line_ends
        token = int(rng.choice(may))
        if token == EOS:
            return
        for one in (both, alone):
            one.follow((token,))


def test_the_tag_waits_for_the_rest_of_a_character(grammars: Grammars, tokenizer: tokenizers.Tokenizer) -> None:
    """é begins with a byte that no tag may follow."""
    first, *_ = tokenizer.encode("é", add_special_tokens=False).ids
    if tokenizer.decode([first]) == "é":
        pytest.skip("it is one token")
    constraint = grammars.constraint(guided(opened=True, limit=1))
    constraint.follow((first,))
    tag = tokenizer.encode("</t>", add_special_tokens=False).ids
    assert tag[0] not in allowed(constraint)
    constraint.follow(tokenizer.encode("é", add_special_tokens=False).ids[1:])
    for token in tag:
        assert allowed(constraint) == [token]
        constraint.follow((token,))
    assert len(allowed(constraint)) > 3

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.rope import RopeParameters, RotaryEmbedding
from tests.support.tolerances import assert_close

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HEAD_DIM, TRAINED, POSITIONS, THETA = 32, 64, 200, 5000.0
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 48}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "linear": ("linear", {"factor": 3.0}),
    "dynamic": ("dynamic", {"factor": 2.5}),
    "llama3": ("llama3", LLAMA3),
    "yarn": ("yarn", YARN),
    "yarn, a little": ("yarn", {**YARN, "factor": 1.5}),
    "yarn, by less than 1": ("yarn", {**YARN, "factor": 0.5}),
    "yarn attention factor": ("yarn", {**YARN, "attention_factor": 1.7}),
    "yarn betas": ("yarn", {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}),
    "yarn mscale": ("yarn", {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}),
}


def pair(rope_type: str, fields: dict[str, Any]) -> "tuple[RotaryEmbedding, LlamaRotaryEmbedding]":
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_type": rope_type, "rope_theta": THETA, **fields},
    )
    ours = RopeParameters(rope_type, HEAD_DIM, theta=THETA, max_position_embeddings=TRAINED, **fields)
    return RotaryEmbedding(ours, POSITIONS, "cpu", torch.float32), LlamaRotaryEmbedding(config)


@pytest.mark.parametrize(("rope_type", "fields"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("length", [TRAINED // 2, POSITIONS])
def test_as_transformers(rope_type: str, fields: dict[str, Any], length: int) -> None:
    """cos and sin of a whole prompt, and q and k rotated by them."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    ours, theirs = pair(rope_type, fields)
    positions = torch.arange(length)
    lengths = torch.full((length,), length)
    q, k = torch.randn(length, 4, HEAD_DIM), torch.randn(length, 2, HEAD_DIM)
    expected = theirs(q, positions[None])
    for actual, reference in zip(ours.cos_sin(positions, lengths), expected, strict=True):
        torch.testing.assert_close(actual, reference[0], rtol=0, atol=2e-6)
    rotated = apply_rotary_pos_emb(q, k, expected[0][0], expected[1][0])
    for actual, reference in zip(ours.rotation(positions, lengths).apply_both(q, k), rotated, strict=True):
        assert_close(actual, reference)


@pytest.mark.parametrize("fields", [{}, {"factor": 1.0}, {"factor": 3.0}, {"factor": 3.0, "attention_factor": 1.7}])
@pytest.mark.parametrize("length", [TRAINED, TRAINED + 1, 3 * TRAINED])
def test_longrope_is_as_transformers(fields: dict[str, Any], length: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    factors = [1 + index / 4 for index in range(HEAD_DIM // 2)]
    scaling = {"rope_type": "longrope", "rope_theta": THETA, "short_factor": factors, "long_factor": factors[::-1]}
    config = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=4 * TRAINED,
        rope_parameters={**scaling, "original_max_position_embeddings": TRAINED, **fields},
    )
    ours = RopeParameters(
        "longrope",
        HEAD_DIM,
        theta=THETA,
        original_max_position_embeddings=TRAINED,
        short_factor=tuple(factors),
        long_factor=tuple(factors[::-1]),
        **{"factor": 4.0, **fields},
    )
    positions, lengths = torch.arange(length), torch.full((length,), length)
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1), positions[None])
    embedding = RotaryEmbedding(ours, 3 * TRAINED, "cpu", torch.float32)
    for one, reference in zip(embedding.cos_sin(positions, lengths), (cos, sin), strict=True):
        torch.testing.assert_close(one, reference[0], rtol=0, atol=2e-6)
    rotation = embedding.rotation(positions, lengths)
    torch.testing.assert_close(rotation.cos[:, 0], cos[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(
        rotation.signed_sin[:, 0, HEAD_DIM // 2 :], sin[0, :, HEAD_DIM // 2 :], rtol=0, atol=2e-6
    )


def test_dynamic_follows_the_length_of_each_forward() -> None:
    """A prompt longer than the trained length, then decode steps: transformers changes frequencies at each."""
    ours, theirs = pair("dynamic", {"factor": 2.0})
    for position in range(TRAINED + 20, TRAINED + 40):
        at = torch.tensor([position])
        expected = theirs(torch.empty(1), at[None])
        for actual, reference in zip(ours.cos_sin(at), expected, strict=True):
            torch.testing.assert_close(actual, reference[0], rtol=0, atol=2e-6)


LONGROPE = {
    "original_max_position_embeddings": 80,
    "short_factor": tuple(1 + index / 4 for index in range(HEAD_DIM // 2)),
    "long_factor": tuple(5 + index / 4 for index in range(HEAD_DIM // 2)),
}


@pytest.mark.parametrize(("rope_type", "fields"), [("dynamic", {"factor": 2.0}), ("longrope", LONGROPE)])
def test_lengths_may_differ_in_one_call(rope_type: str, fields: dict[str, Any]) -> None:
    parameters = RopeParameters(rope_type, HEAD_DIM, theta=THETA, max_position_embeddings=TRAINED, **fields)
    ours = RotaryEmbedding(parameters, POSITIONS, "cpu", torch.float32)
    positions = torch.tensor([3, 3, 70, 70])
    lengths = torch.tensor([TRAINED, TRAINED + 30, 71, 150])
    together = ours.rotation(positions, lengths)
    for row in range(4):
        alone = ours.rotation(positions[row : row + 1], lengths[row : row + 1])
        torch.testing.assert_close(together.cos[row], alone.cos[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(together.signed_sin[row], alone.signed_sin[0], rtol=0, atol=1e-6)
    assert not torch.equal(together.cos[0], together.cos[1])


def test_only_the_leading_elements_rotate() -> None:
    rotary = RotaryEmbedding(RopeParameters("default", 8), POSITIONS, "cpu", torch.float32)
    whole = RotaryEmbedding(RopeParameters("default", 8), POSITIONS, "cpu", torch.float32)
    q, k = torch.randn(5, 4, 12), torch.randn(5, 2, 12)
    rotation = rotary.rotation(torch.arange(5))
    rotated = rotation.apply_both(q, k)
    for actual, x in zip(rotated, (q, k), strict=True):
        assert torch.equal(actual[..., 8:], x[..., 8:])
        assert torch.equal(actual[..., :8], whole.rotation(torch.arange(5)).apply(x[..., :8].contiguous()))


@pytest.mark.parametrize("tokens", [1, 5])
def test_heads_of_one_projection_rotate_as_separate_ones_do(tokens: int) -> None:
    rotary = RotaryEmbedding(RopeParameters("default", HEAD_DIM), POSITIONS, "cpu", torch.float32)
    rotation = rotary.rotation(torch.arange(tokens))
    fused = torch.randn(tokens, 8, HEAD_DIM)
    before = fused.clone()
    views = fused.split((4, 2, 2), 1)
    separate = rotation.apply_both(views[0].clone(), views[1].clone())
    for actual, expected in zip(rotation.apply_both(views[0], views[1]), separate, strict=True):
        assert torch.equal(actual, expected)
    swapped = rotation.apply_both(views[1], views[0])
    assert torch.equal(swapped[0], separate[1])
    assert torch.equal(fused, before)


def test_the_rotation_has_the_dtype_of_q_and_k() -> None:
    rotary = RotaryEmbedding(RopeParameters("default", HEAD_DIM), POSITIONS, "cpu", torch.bfloat16)
    x = torch.randn(6, 2, HEAD_DIM)
    exact = RotaryEmbedding(RopeParameters("default", HEAD_DIM), POSITIONS, "cpu", torch.float32)
    rotated = rotary.rotation(torch.arange(6)).apply(x.bfloat16())
    assert rotated.dtype == torch.bfloat16
    assert_close(rotated, exact.rotation(torch.arange(6)).apply(x))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "ntk"}, "rope_type is 'ntk'; it must be one of none, default"),
        ({"rotary_dim": 7}, "rotary_dim is 7; it must be even"),
        ({"theta": 0.0}, "theta is 0.0"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor is nan"),
        ({"rope_type": "dynamic"}, "max_position_embeddings is None"),
        ({"rope_type": "yarn"}, "original_max_position_embeddings is None"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 8}, r"short_factor is \(\); .* needs 4 numbers"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 1}, "original_max_position_embeddings is 1;"),
        ({"rope_type": "llama3", "original_max_position_embeddings": 8}, "low_freq_factor is None"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8, "theta": 1.0}, r"theta is 1\.0; .* than 1"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8, "attention_factor": 0.0}, "^attention_factor is"),
        ({"theta": "1"}, "theta is '1'; it must be a number"),
    ],
)
def test_bad_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"rope_type": "default", "rotary_dim": 8, **fields}
    with pytest.raises(InvalidArgument, match=message):
        RopeParameters(**given)

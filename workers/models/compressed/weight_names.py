"""The weight names of DeepSeek-V4 as it is published, after `model.`."""

from torch import Tensor

from tandem.workers.kernels.base import HyperParameters
from tandem.workers.models.compressed.parameters import CompressorParameters, SharedParameters
from tandem.workers.weights.weight import Weight

# From the names that are published, and those that transformers writes, to those that all families share.
RENAMES = (
    (r"^hc_head_", "model.hc_head.hc_"),
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^norm\.", "model.norm."),
    (r"^layers\.", "model.layers."),
)


def hyper_head_weights(head: HyperParameters) -> dict[str, Tensor]:
    return _hyper_weights("model.hc_head.hc", head)


def hyper_weights(prefix: str, both: tuple[HyperParameters, HyperParameters]) -> dict[str, Tensor]:
    return _hyper_weights(f"{prefix}.hc_attn", both[0]) | _hyper_weights(f"{prefix}.hc_ffn", both[1])


def shared_weights(prefix: str, parameters: SharedParameters) -> dict[str, Tensor]:
    """Returns the weights of a layer's attention by name."""
    weights = {
        **parameters.q_down.named(f"{prefix}.wq_a"),
        f"{prefix}.q_norm.weight": parameters.q_norm,
        **parameters.q_up.named(f"{prefix}.wq_b"),
        **parameters.kv.named(f"{prefix}.wkv"),
        f"{prefix}.norm.weight": parameters.kv_norm,
        f"{prefix}.attn_sink": parameters.sinks,
        **{f"{prefix}.wo_a.{kind}": tensor.flatten(0, 1) for kind, tensor in parameters.out.tensors().items()},
        **parameters.o.named(f"{prefix}.wo_b"),
    }
    return weights if parameters.compressor is None else weights | _compressor_weights(prefix, parameters.compressor)


def _compressor_weights(prefix: str, parameters: CompressorParameters) -> dict[str, Tensor]:
    weights, begin = {}, 0
    names = (f"{prefix}.compressor", f"{prefix}.indexer.compressor")
    for name, bias, norm in zip(names, parameters.biases, parameters.norms, strict=False):
        end = begin + bias.shape[1]
        weights |= {
            **parameters.values.slice(begin, end).named(f"{name}.wkv"),
            **parameters.gates.slice(begin, end).named(f"{name}.wgate"),
            f"{name}.ape": bias,
            f"{name}.norm.weight": norm,
        }
        begin = end
    if parameters.query is not None:
        weights |= parameters.query.q_up.named(f"{prefix}.indexer.wq_b")
        weights |= parameters.query.weights.named(f"{prefix}.indexer.weights_proj")
    return weights


def _hyper_weights(prefix: str, one: HyperParameters) -> dict[str, Tensor]:
    return {f"{prefix}_fn": one.fn, f"{prefix}_base": one.base, f"{prefix}_scale": one.scale}


def gated_weights(prefix: str, gate_up: Weight, down: Weight) -> dict[str, Tensor]:
    gate, up = gate_up.slice(0, down.columns), gate_up.slice(down.columns, gate_up.rows)
    return gate.named(f"{prefix}.w1") | up.named(f"{prefix}.w3") | down.named(f"{prefix}.w2")

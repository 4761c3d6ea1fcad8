"""The weight names of DeepSeek-V4 as it is published, behind `model.`."""

from torch import Tensor

from tandem.workers.kernels.base import HyperParameters, Linear
from tandem.workers.models.compressed.parameters import CompressorParameters, SharedParameters

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
    """Those of a layer's attention."""
    weights = {
        f"{prefix}.wq_a.weight": parameters.q_down.weight,
        f"{prefix}.q_norm.weight": parameters.q_norm,
        f"{prefix}.wq_b.weight": parameters.q_up.weight,
        f"{prefix}.wkv.weight": parameters.kv.weight,
        f"{prefix}.norm.weight": parameters.kv_norm,
        f"{prefix}.attn_sink": parameters.sinks,
        f"{prefix}.wo_a.weight": parameters.out.flatten(0, 1),
        f"{prefix}.wo_b.weight": parameters.o.weight,
    }
    return weights if parameters.compressor is None else weights | _compressor_weights(prefix, parameters.compressor)


def _compressor_weights(prefix: str, parameters: CompressorParameters) -> dict[str, Tensor]:
    weights, sizes = {}, [bias.shape[1] for bias in parameters.biases]
    names = (f"{prefix}.compressor", f"{prefix}.indexer.compressor")
    rows = zip(names, parameters.values.split(sizes), parameters.gates.split(sizes), strict=False)
    for (name, values, gates), bias, norm in zip(rows, parameters.biases, parameters.norms, strict=True):
        weights |= {
            f"{name}.wkv.weight": values,
            f"{name}.wgate.weight": gates,
            f"{name}.ape": bias,
            f"{name}.norm.weight": norm,
        }
    if parameters.query is not None:
        weights[f"{prefix}.indexer.wq_b.weight"] = parameters.query.q_up
        weights[f"{prefix}.indexer.weights_proj.weight"] = parameters.query.weights
    return weights


def _hyper_weights(prefix: str, one: HyperParameters) -> dict[str, Tensor]:
    return {f"{prefix}_fn": one.fn, f"{prefix}_base": one.base, f"{prefix}_scale": one.scale}


def gated_weights(prefix: str, gate_up: Linear, down: Linear) -> dict[str, Tensor]:
    gate, up = gate_up.weight.chunk(2)
    return {f"{prefix}.w1.weight": gate, f"{prefix}.w3.weight": up, f"{prefix}.w2.weight": down.weight}

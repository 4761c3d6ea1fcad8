"""What a mixture of experts is to its decoder: which layers route, where to, and what the checkpoint calls it."""

from dataclasses import dataclass

from tandem.workers.models.fields import Fields


@dataclass(frozen=True)
class ExpertNames:
    """Where a checkpoint keeps a layer's experts: `block` is the submodule of the layer, `router` is within it.

    projections: gate, up and down of one expert, `experts.<n>.<name>.weight`; None where no such layout exists. The
    other layout has one tensor for all experts, `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`.
    transposed: that the latter have rows of inputs, not of outputs.
    """

    block: str
    router: str
    projections: tuple[str, str, str] | None
    transposed: bool = False


@dataclass(frozen=True)
class MoeConfig:
    """Each token of a layer in `layers` goes to top_k of num_experts experts of intermediate_size each.

    A token's weights are the softmax over all experts, taken at the chosen ones; normalize: divided by their sum, which
    is the softmax over the chosen. bias: the router and the experts have biases.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: frozenset[int]
    normalize: bool
    names: ExpertNames
    bias: bool = False


def read_moe(
    fields: Fields,
    names: ExpertNames,
    *,
    normalize: bool,
    layers: frozenset[int] | None = None,
    intermediate_size: str = "intermediate_size",
    bias: bool = False,
) -> MoeConfig:
    """num_local_experts (or num_experts, as the same field was called) and num_experts_per_tok; raises InvalidConfig.

    layers None: all. intermediate_size: the name of the field that has an expert's.
    """
    num_experts = fields.integer("num_experts" if "num_experts" in fields else "num_local_experts", minimum=1)
    top_k = fields.integer("num_experts_per_tok", minimum=1)
    if top_k > num_experts:
        raise fields.invalid("num_experts_per_tok", f"at most the number of experts, {num_experts}")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.integer(intermediate_size, minimum=1),
        layers=frozenset(range(fields.integer("num_hidden_layers", minimum=1))) if layers is None else layers,
        normalize=normalize,
        names=names,
        bias=bias,
    )

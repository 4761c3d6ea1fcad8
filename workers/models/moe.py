"""What a mixture of experts is to its decoder: which layers route, where to, and what the checkpoint calls it."""

from dataclasses import dataclass

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.routing import Routing


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
    """Each token of a layer in `layers` goes to some of num_experts experts of intermediate_size each, by `routing`.

    bias: the router and the experts have biases. shared_size: the intermediate size of a feed-forward that every token
    takes besides; 0: there is none. float32_router: logits are computed in float32.
    """

    num_experts: int
    routing: Routing
    intermediate_size: int
    layers: frozenset[int]
    names: ExpertNames
    bias: bool = False
    shared_size: int = 0
    float32_router: bool = False


def read_moe(
    fields: Fields,
    names: ExpertNames,
    *,
    normalize: bool,
    layers: frozenset[int] | None = None,
    intermediate_size: str = "intermediate_size",
    bias: bool = False,
    count: str = "num_local_experts",
) -> MoeConfig:
    """How many experts there are and num_experts_per_tok; raises InvalidConfig.

    layers None: all. intermediate_size, count: the names of the fields that have an expert's and their number; it was
    called num_experts, too.
    """
    num_experts = fields.integer("num_experts" if "num_experts" in fields else count, minimum=1)
    top_k = fields.integer("num_experts_per_tok", minimum=1)
    if top_k > num_experts:
        raise fields.invalid("num_experts_per_tok", f"at most the number of experts, {num_experts}")
    return MoeConfig(
        num_experts=num_experts,
        routing=Routing(top_k, normalize),
        intermediate_size=fields.integer(intermediate_size, minimum=1),
        layers=frozenset(range(fields.integer("num_hidden_layers", minimum=1))) if layers is None else layers,
        names=names,
        bias=bias,
    )

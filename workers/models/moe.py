"""The sizes of a mixture of experts, its routing, and its names in a checkpoint."""

from dataclasses import dataclass

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.routing import Routing

MAX_EXPERTS = 1 << 14  # more than any model has


@dataclass(frozen=True)
class ExpertNames:
    """The weight names of a layer's experts in a checkpoint: a tensor for each expert, or one for all.

    The second layout has `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`.
    """

    block: str  # the submodule of the layer
    router: str  # within the block
    projections: (
        tuple[str, ...] | None
    )  # gate, if any, up and down in `experts.<n>.<name>.weight`; None: no such layout
    transposed: bool = False  # in the second layout, rows are of inputs, not of outputs
    shared: str = "shared_experts"  # what every token takes besides, within the block
    shared_gate: str | None = None  # a number for each token, whose sigmoid multiplies that; None: there is none


GATED_NAMES = ExpertNames(block="mlp", router="gate", projections=("gate_proj", "up_proj", "down_proj"))


@dataclass(frozen=True)
class MoeConfig:
    """The experts of some layers, among which tokens are divided."""

    num_experts: int  # of all shards
    routing: Routing
    intermediate_size: int  # of each expert
    layers: frozenset[int]  # those with experts
    names: ExpertNames
    bias: bool = False  # the router and the experts have biases
    shared_size: int = 0  # intermediate size of a feed-forward that every token takes besides; 0: there is none
    float32_router: bool = False  # logits are computed in float32
    hashed: frozenset[int] = frozenset()  # the layers in which a table chooses the experts of each token's id
    latent_size: int | None = None  # of what experts take and give, between two maps; None: hidden_size
    beside: bool = False  # they stand next to a dense feed-forward, see BesideParameters


def read_moe(
    fields: Fields,
    names: ExpertNames,
    *,
    normalize: bool,
    layers: frozenset[int] | None = None,
    intermediate_size: str = "intermediate_size",
    bias: bool = False,
    count: str = "num_local_experts",
    top_k: str = "num_experts_per_tok",
) -> MoeConfig:
    """Reads the number of experts, and to how many a token goes. Raises InvalidConfig.

    layers None: all. intermediate_size, count, top_k: the names of the fields for an expert's size, the number of
    experts, and the experts of a token. count was called num_experts, too.
    """
    num_experts = fields.integer("num_experts" if "num_experts" in fields else count, minimum=1, maximum=MAX_EXPERTS)
    chosen = fields.integer(top_k, minimum=1)
    if chosen > num_experts:
        raise fields.invalid(top_k, f"at most the number of experts, {num_experts}")
    return MoeConfig(
        num_experts=num_experts,
        routing=Routing(chosen, normalize),
        intermediate_size=fields.integer(intermediate_size, minimum=1),
        layers=frozenset(range(fields.integer("num_hidden_layers", minimum=1))) if layers is None else layers,
        names=names,
        bias=bias,
    )

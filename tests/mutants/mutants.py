"""Protections to take out, one at a time. A line that keeps users from harm, and no feature, belongs here."""

from tests.mutants.of_access import ACCESS
from tests.mutants.of_adapters import ADAPTERS
from tests.mutants.of_cache import CACHE
from tests.mutants.of_cluster import CLUSTER
from tests.mutants.of_handoff import HANDOFF
from tests.mutants.of_keys import KEYS
from tests.mutants.of_operators import OPERATORS
from tests.mutants.of_parking import PARKING
from tests.mutants.of_served_adapters import SERVED_ADAPTERS
from tests.mutants.of_supervision import SUPERVISION
from tests.mutants.of_transfer import TRANSFER
from tests.mutants.of_workers import WORKERS

MUTANTS = (
    *CACHE,
    *TRANSFER,
    *HANDOFF,
    *WORKERS,
    *PARKING,
    *ADAPTERS,
    *CLUSTER,
    *SUPERVISION,
    *ACCESS,
    *SERVED_ADAPTERS,
    *OPERATORS,
    *KEYS,
)

"""The fork server of a cluster that a command starts: it shares the imports of the command."""

import os
from typing import TYPE_CHECKING

from tandem.cluster.config.cluster_config import ClusterConfig

if TYPE_CHECKING:
    from tandem.cluster.processes.forks.fork_server import ForkServer


def prefer_idle_threads() -> None:
    """Before torch is imported here: threads of a fork server's actors then sleep while they wait, not spin."""
    from tandem.cluster.processes.forks.fork_server import THREADS

    os.environ.update(THREADS)


def fork_beside(config: ClusterConfig) -> "ForkServer":
    """Imports what workers need, which this process needs, too, and forks the server. For a process without threads.

    Neither Ray nor a gateway's modules are there yet: this process imports the one while the server imports the other.
    """
    prefer_idle_threads()
    import tandem.cluster.supervision.worker_actor  # noqa: F401
    from tandem.cluster.processes.forks.fork_server import ForkServer
    from tandem.cluster.supervision.process_modules import process_modules

    return ForkServer.beside(process_modules(config), config.name)

"""The fork server of a cluster that a command starts: it shares the imports of the command."""

import os
from typing import TYPE_CHECKING

from tandem.cluster.config.cluster_config import ClusterConfig

if TYPE_CHECKING:
    from tandem.cluster.processes.forks.fork_server import ForkServer


def prefer_idle_threads() -> None:
    """Makes threads of a fork server's actors sleep while they wait, not spin. Call it before torch is imported
    here."""
    from tandem.cluster.processes.forks.fork_server import THREADS

    os.environ.update(THREADS)


def fork_beside(config: ClusterConfig) -> "ForkServer":
    """Imports the modules of workers, which this process needs, too, and forks the server. Needs a process without
    threads.

    Neither Ray nor a gateway's modules are imported yet: this process imports Ray while the server imports the others.
    """
    prefer_idle_threads()
    import tandem.cluster.supervision.worker_actor  # noqa: F401
    from tandem.cluster.processes.forks.fork_server import ForkServer
    from tandem.cluster.supervision.process_modules import process_modules

    return ForkServer.beside(process_modules(config), config.name)

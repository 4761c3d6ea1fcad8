"""The address of the fork server that all processes of a test run share: its imports take seconds."""

import os
import secrets

VARIABLE = "TANDEM_TESTS_FORKED_BY"


def share_fork_server() -> None:
    """Shares one fork server between this process and the processes that it starts."""
    os.environ.setdefault(VARIABLE, f"tandem/forks/{secrets.token_hex(16)}")


def shared_address() -> str | None:
    """Returns the address; None outside a test run."""
    return os.environ.get(VARIABLE)

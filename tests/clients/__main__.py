"""`make clients`: published clients talk to a cluster on this machine. Prints JSON: each client and what came of it.

python -m tests.clients [--only NAME ...] [--environments FOLDER] [--http URL --grpc HOST:PORT --model NAME
    --tokenizer FOLDER]

The clients are installed into environments of their own, below build/clients, from the files with their versions beside
this one. One that cannot be installed, or needs a route that the server lacks, is skipped, with the reason. With --http
they talk to a server that runs, with TANDEM_API_KEY as their token. The exit code is 1 where a client failed.
"""

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path

from tests.clients.environments import ROOT, Environments
from tests.clients.outcome import Outcome
from tests.clients.scripts import SCRIPTS, Script
from tests.clients.served import Served, from_options, served


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[script.name for script in SCRIPTS], default=[])
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "clients", metavar="FOLDER")
    parser.add_argument("--http", metavar="URL", help="of a server that runs")
    parser.add_argument("--grpc", metavar="HOST:PORT", default="127.0.0.1:50051", help="of that server")
    parser.add_argument("--model", metavar="NAME", default="", help="that it serves")
    parser.add_argument("--tokenizer", metavar="FOLDER", default="", help="of its checkpoint")
    options = parser.parse_args()
    chosen = [script for script in SCRIPTS if not options.only or script.name in options.only]
    environments = Environments(options.environments)
    for name in dict.fromkeys(script.environment for script in chosen):
        environments.make(name)
    running = (
        nullcontext(from_options(options.http, options.grpc, options.model, options.tokenizer))
        if options.http
        else served(options.environments / "model")
    )
    with running as server:
        outcomes = [said(script, outcome_of(script, environments, server)) for script in chosen]
    counts = {kind: sum(one.kind == kind for one in outcomes) for kind in ("passed", "failed", "skipped")}
    print(json.dumps({"clients": [one.summary for one in outcomes], **counts}, indent=1))
    return 1 if counts["failed"] else 0


def outcome_of(script: Script, environments: Environments, server: Served) -> Outcome:
    version = environments.version(script.environment, script.package)
    if version is None:
        return Outcome.skipped(script, environments.reason(script.environment))
    if script.route and not server.has(script.route):
        return Outcome.skipped(script, f"the server has no {script.route}", version)
    ended = environments.run(script.environment, script.path, server.variables)
    return Outcome.of(script, version, ended)


def said(script: Script, outcome: Outcome) -> Outcome:
    """Prints progress beside the JSON."""
    print(f"{outcome.kind} {script.name} {outcome.version}: {outcome.reason}".rstrip(": "), file=sys.stderr, flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tandem.cluster.cli`: the command line, see commands.py."""

from tandem.cluster.cli.commands import main

main()

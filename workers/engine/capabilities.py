"""The capabilities of an engine, by its device, kernels, model and captures."""

from typing import NamedTuple

from tandem.workers.runner.batch_buckets import GraphSizes


class Capabilities(NamedTuple):
    """overlaps: whether a step may be launched before the tokens of the step before are read. drafts: whether a model
    or a head drafts here. most_following: sequences of a verify step that may be launched before the one before is
    read; 0: none may. looks_up: whether such a step takes its drafts from the tokens themselves, not from draft_behind.
    sizes: of forwards in CUDA graphs.
    """

    overlaps: bool
    drafts: bool
    most_following: int
    looks_up: bool
    sizes: GraphSizes = GraphSizes()

"""The small worlds to explore. Each has little of everything except its subject."""

from tests.protocol.small_island import DECODE, PREFILL, Shape
from tests.protocol.world import Limits

LOCAL = ((1, 1),)  # the worker that decodes computes the prompt, too

WORLDS: dict[str, tuple[Limits, Shape]] = {
    "plain": (Limits(), Shape()),
    "speculative": (Limits(announces=1), Shape(max_batch_tokens=2)),
    "announced": (Limits(announces=2, sends=2, aborts=1, hang_ups=True, ticks=1), Shape(max_batch_tokens=2)),
    "speculative in the way": (Limits(requests=2, announces=1), Shape(max_batch_tokens=2)),
    "cancel": (Limits(aborts=2, hang_ups=True, streams_end=True), Shape()),
    "twice": (Limits(prepares=2, sends=2, starts=2), Shape()),
    "recall": (Limits(streams_end=True, failed_posts=1), Shape()),
    "expire": (Limits(ticks=2, hang_ups=True), Shape()),
    "turns": (Limits(requests=2, streams_end=True), Shape(num_pages=6, num_signals=1)),
    "reuse": (Limits(requests=2, sends=2, streams_end=True, ticks=1), Shape(num_signals=1)),
    "overlapped": (Limits(streams_end=True), Shape(num_pages=5, max_tokens=3, overlapped=True)),
    "epoch": (Limits(requests=2, deaths=1), Shape()),
    "local": (Limits(aborts=1, streams_end=True, ticks=2, starts=2, routes=LOCAL), Shape()),
    "local beside a push": (Limits(requests=2, streams_end=True, routes=(*LOCAL, (0, 1))), Shape(num_pages=6)),
    "local overlapped": (
        Limits(requests=2, streams_end=True, routes=(*LOCAL, (0, 1))),
        Shape(num_pages=4, max_tokens=2, overlapped=True, longest=3),
    ),
    "local joint": (
        Limits(requests=2, streams_end=True, routes=(*LOCAL, (0, 1))),
        Shape(num_pages=7, max_tokens=3, overlapped=True, joint=True),
    ),
    "both ways": (Limits(requests=2, streams_end=True, routes=((0, 1), (1, 0))), Shape(num_pages=6, longest=3)),
    "recalls both ways": (
        Limits(requests=2, sends=0, streams_end=True, routes=((0, 1), (1, 0))),
        Shape(num_pages=6, longest=3),
    ),
    "the writer leaves": (Limits(requests=2, sends=2, streams_end=True, leaver=PREFILL), Shape(num_signals=1)),
    "the receiver leaves": (Limits(requests=2, sends=2, streams_end=True, leaver=DECODE), Shape(num_signals=1)),
    "one leaves both ways": (
        Limits(requests=2, streams_end=True, routes=((0, 1), (1, 0)), leaver=DECODE),
        Shape(num_pages=6, longest=3),
    ),
    "the writer leaves for good": (
        Limits(requests=2, sends=2, streams_end=True, leaver=PREFILL, comes_back=False),
        Shape(num_signals=1),
    ),
    "the receiver leaves for good": (
        Limits(requests=2, sends=2, streams_end=True, leaver=DECODE, comes_back=False),
        Shape(num_signals=1),
    ),
    "the writer joins and leaves": (
        Limits(requests=2, prepares=2, sends=2, streams_end=True, leaver=PREFILL, comes_back=False, joins=True),
        Shape(num_signals=1),
    ),
    "the receiver joins": (
        Limits(requests=2, prepares=2, sends=2, streams_end=True, leaver=DECODE, joins=True),
        Shape(num_signals=1),
    ),
    "sharing": (Limits(requests=2, alike=True), Shape(num_pages=6, sharing=True)),
}

"""`tandem trace`: the spans of one request as Chrome trace JSON, which Perfetto shows."""

import json

from tandem.proto import admin_pb2


def chrome_trace(trace: admin_pb2.Trace) -> str:
    """Returns a row for each process, in the order in which the request reached them. Times are in microseconds from
    its beginning."""
    begin = min(span.begin_ns for span in trace.spans)
    rows = {name: row for row, name in enumerate(dict.fromkeys(span.process for span in trace.spans), start=1)}
    events: list[dict[str, object]] = []
    for name, row in rows.items():
        for kind, arguments in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": row})):
            events.append({"ph": "M", "name": kind, "pid": row, "tid": 0, "args": arguments})
    for span in sorted(trace.spans, key=lambda span: (span.begin_ns, -span.end_ns)):
        times = {"ts": (span.begin_ns - begin) / 1000, "dur": (span.end_ns - span.begin_ns) / 1000}
        row, arguments = rows[span.process], dict(span.attributes)
        events.append({"ph": "X", "name": span.name, "pid": row, "tid": 0, **times, "args": arguments})
    other = {"request_id": trace.request_id, "trace_id": trace.trace_id}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})

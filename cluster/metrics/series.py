"""The metrics that the gateway's processes count for requests, under the names of a scrape.

Names that begin with `vllm:` are vLLM's, with its meanings, so that its dashboards and autoscalers work.
"""

from tandem.cluster.errors.statuses import GRPC_CODES, HTTP_CODES
from tandem.cluster.metrics.cells import CellLayout, Counter, Histogram

SHORT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
LONG = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 600.0)
TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))

GRPC, HTTP = "grpc", "http"
STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"
LOST, FAILED = "lost", "failed"
MET, MISSED = "met", "missed"

PROMPT_TOKENS = Counter("vllm:prompt_tokens", "Tokens of prompts whose first token is there.")
GENERATION_TOKENS = Counter("vllm:generation_tokens", "Output tokens sent to clients.")
PREFIX_QUERIES = Counter("vllm:prefix_cache_queries", "Prompt tokens that were looked for in prefix caches.")
PREFIX_HITS = Counter("vllm:prefix_cache_hits", "Prompt tokens that prefix caches had.")
HOST_HITS = Counter("tandem:host_cache_hits", "Prompt tokens of these that were copied back from host memory.")
DISK_HITS = Counter("tandem:disk_cache_hits", "Prompt tokens of these that were read from a disk before.")
DRAFTED = Counter("vllm:spec_decode_num_draft_tokens", "Tokens that speculation drafted.")
ACCEPTED = Counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
PREEMPTIONS = Counter("vllm:num_preemptions", "Always 0: tandem:worker_parks_total counts parked requests.")
SUCCESS = Counter(
    "vllm:request_success",
    "Requests that were valid and have ended, by why.",
    labels=("finished_reason",),
    series=((STOP,), (LENGTH,), (ABORT,), (ERROR,)),
)
FIRST_TOKEN = Histogram("vllm:time_to_first_token_seconds", "From arrival to the first token sent.", FIRST)
TARGETS = Counter(
    "tandem:first_token_targets",
    "First tokens of requests with one answer and a target for it, by whether they came in time.",
    labels=("outcome",),
    series=((MET,), (MISSED,)),
)
GAPS = Histogram(
    "vllm:inter_token_latency_seconds",
    "From one token sent to the next; those of one message share its time.",
    SHORT,
    also="vllm:time_per_output_token_seconds",
)
TOKEN_TIME = Histogram(
    "vllm:request_time_per_output_token_seconds", "Mean time from one token to the next, a request each.", SHORT
)
TOTAL = Histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", LONG)
QUEUE = Histogram("vllm:request_queue_time_seconds", "From arrival to room on a decode worker.", LONG)
INFERENCE = Histogram("vllm:request_inference_time_seconds", "From room to the last token.", LONG)
PREFILL = Histogram("vllm:request_prefill_time_seconds", "From room to the first token.", LONG)
DECODE = Histogram("vllm:request_decode_time_seconds", "From the first token to the last.", LONG)
PROMPT_LENGTH = Histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS, unit=1.0)
OUTPUT_LENGTH = Histogram("vllm:request_generation_tokens", "Output tokens of a request.", TOKENS, unit=1.0)
MAX_TOKENS = Histogram("vllm:request_params_max_tokens", "What requests ask for at most.", TOKENS, unit=1.0)

BY_ADAPTER, BY_MODEL = "adapter", "model"
ANSWERED = Counter(
    "tandem:answered_requests",
    "Requests that were valid and have ended, by what answered: a LoRA adapter or the model itself.",
    labels=("by",),
    series=((BY_ADAPTER,), (BY_MODEL,)),
)
PUSHES = Counter("tandem:pushes", "Prompts whose KV was pushed to another worker.")
PUSH_BYTES = Counter("tandem:push_bytes", "Bytes of KV pushed.")
PUSH_SECONDS = Counter("tandem:push_seconds", "What pushes added to prompts, in calls and in waits.", unit=1e-6)
PREFILL_SECONDS = Counter("tandem:prefill_seconds", "From prompts' first forward until all KV was there.", unit=1e-6)
LOCAL_PROMPTS = Counter("tandem:local_prompts", "Prompts that their decode worker computed itself.")
RESERVATIONS = Counter("tandem:reservations", "Placements: pages set aside on a decode worker.")
MOVES = Counter("tandem:moves", "Requests moved to another decode worker while they were decoded.")
REPLAYS = Counter(
    "tandem:replays",
    "Placements lost, by why. The request is placed again if attempts are left.",
    labels=("reason",),
    series=((LOST,), (FAILED,)),
)
REJECTED = Counter(
    "tandem:rejected",
    "Calls that ended with an error, by the frontend's own statuses; tandem:key_refused counts keys' limits.",
    labels=("frontend", "code"),
    series=(*((GRPC, code) for code in GRPC_CODES), *((HTTP, str(code)) for code in HTTP_CODES)),
)

KEYS_FILE_ERRORS = Counter(
    "tandem:keys_file_errors", "Changes of security.keys_file that could not be used, once a host."
)

LAYOUT = CellLayout([one for one in [*globals().values()] if isinstance(one, Counter | Histogram)])
"""The cells of all metrics above, in their order."""

"""The tiers of the tests, and the order in which the processes of a run get their files.

unit   no process, cluster, compiler or model of transformers: everything that NOT_UNIT does not name
gate   all that is not marked `long`: `make test`
long   what is marked `long`: `make test-long`

A test marked `gate("llama-*", "qwen3")` has cases of both: ids like these are in the gate, others are long.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

# Folders and files that `make test-unit` does not even import.
NOT_UNIT = (
    "tests/benchmarks",
    "tests/cache/attention/test_page_look_up.py",
    "tests/cache/kernels",
    "tests/cache/operations/test_parking.py",
    "tests/cache/operations/test_programs.py",
    "tests/cache/operations/test_sharing.py",
    "tests/cache/operations/test_steps.py",
    "tests/cache/plan/test_rope.py",
    "tests/cache/store/test_disk_kills.py",
    "tests/cache/store/test_programs.py",
    "tests/chaos",
    "tests/cluster/cli/test_cli.py",
    "tests/cluster/cli/test_doctor.py",
    "tests/cluster/cli/test_hung_compilers.py",
    "tests/cluster/cli/test_kernel_plan.py",
    "tests/cluster/cli/test_once_a_host.py",
    "tests/cluster/cli/test_preflight.py",
    "tests/cluster/tools/test_random_checkpoint.py",
    "tests/cluster/cli/test_runtime_dir.py",
    "tests/cluster/cli/test_top.py",
    "tests/cluster/frontends/test_adapters.py",
    "tests/cluster/frontends/test_added_route.py",
    "tests/cluster/frontends/test_cors.py",
    "tests/cluster/frontends/test_floods.py",
    "tests/cluster/frontends/test_grpc_tools.py",
    "tests/cluster/frontends/test_http_connection.py",
    "tests/cluster/frontends/test_http_server.py",
    "tests/cluster/frontends/test_large_requests.py",
    "tests/cluster/frontends/test_messages.py",
    "tests/cluster/frontends/test_min_tokens.py",
    "tests/cluster/frontends/test_monitoring.py",
    "tests/cluster/frontends/test_openapi.py",
    "tests/cluster/frontends/test_prompt_fields.py",
    "tests/cluster/frontends/test_responses.py",
    "tests/cluster/frontends/test_silent_clients.py",
    "tests/cluster/frontends/test_tools.py",
    "tests/cluster/metrics/test_board.py",
    "tests/cluster/metrics/test_scrape.py",
    "tests/cluster/peers/test_table.py",
    "tests/cluster/processes",
    "tests/cluster/requests/test_answers.py",
    "tests/cluster/requests/test_bursts.py",
    "tests/cluster/requests/test_call_limit.py",
    "tests/cluster/requests/test_default_sampling.py",
    "tests/cluster/requests/test_first_token_targets.py",
    "tests/cluster/requests/test_priorities.py",
    "tests/cluster/requests/test_guide_checks.py",
    "tests/cluster/requests/test_readers.py",
    "tests/cluster/requests/test_replay.py",
    "tests/cluster/routing/test_adaptive_roles.py",
    "tests/cluster/routing/test_added_policy.py",
    "tests/cluster/routing/test_token_feed.py",
    "tests/cluster/supervision/test_actors.py",
    "tests/cluster/supervision/test_checked_models.py",
    "tests/cluster/supervision/test_host_builds.py",
    "tests/cluster/supervision/test_launcher.py",
    "tests/cluster/test_security.py",
    "tests/cluster/text/test_tokenizer.py",
    "tests/cluster/tracing",
    "tests/contracts",
    "tests/deploy",
    "tests/e2e",
    "tests/fuzz",
    "tests/gpu",
    "tests/mutants/test_run.py",
    "tests/protocol",
    "tests/test_docs.py",
    "tests/test_layering.py",
    "tests/test_prose.py",
    "tests/test_tiers.py",
    "tests/transfer/nvshmem/test_device_build.py",
    "tests/transfer/test_nixl.py",
    "tests/transfer/test_shared_memory.py",
    "tests/transfer/test_tcp.py",
    "tests/workers/adapters",
    "tests/workers/checkpoint",
    "tests/workers/decode/test_kernel_threads.py",
    "tests/workers/decode/test_parked_rows.py",
    "tests/workers/decode/test_parking.py",
    "tests/workers/decode/test_parking_lanes.py",
    "tests/workers/handoff/test_late_calls.py",
    "tests/workers/following/test_worker_ranks.py",
    "tests/workers/handoff/test_local_reservations.py",
    "tests/workers/handoff/test_reservation_programs.py",
    "tests/workers/kernels",
    "tests/workers/models/test_compressed_kv.py",
    "tests/workers/models/test_compressed_steps.py",
    "tests/workers/models/test_config.py",
    "tests/workers/models/test_decoder.py",
    "tests/workers/models/test_ranks.py",
    "tests/workers/ranks/test_areas.py",
    "tests/workers/ranks/test_exchange.py",
    "tests/workers/ranks/test_shared_ranks.py",
    "tests/workers/models/test_defects.py",
    "tests/workers/models/test_glm_config.py",
    "tests/workers/models/test_index_keys.py",
    "tests/workers/models/test_kv_scales.py",
    "tests/workers/models/test_int4.py",
    "tests/workers/models/test_quantized.py",
    "tests/workers/models/test_recurrent_sharding.py",
    "tests/workers/models/test_sharding.py",
    "tests/workers/models/test_small_batch_decoder.py",
    "tests/workers/models/test_t5gemma.py",
    "tests/workers/models/test_tree_verify.py",
    "tests/workers/models/test_weights.py",
    "tests/workers/prefill",
    "tests/workers/runner/test_logits_processor.py",
    "tests/workers/runner/test_memory_budget.py",
    "tests/workers/runner/test_mixed_batches.py",
    "tests/workers/runner/test_next_drafts.py",
    "tests/workers/runner/test_prompt_graphs.py",
    "tests/workers/runner/test_recurrent_steps.py",
    "tests/workers/runner/test_steps_with_prompts.py",
    "tests/workers/runner/test_steps_with_rules.py",
    "tests/workers/sampling/test_sampling.py",
    "tests/workers/sampling/test_triton_sampling.py",
    "tests/workers/service/test_bad_calls.py",
    "tests/workers/service/test_captured_sides.py",
    "tests/workers/service/test_draining_writes.py",
    "tests/workers/service/test_hung_gateway.py",
    "tests/workers/service/test_local_prompts.py",
    "tests/workers/service/test_log_lines.py",
    "tests/workers/service/test_read_prompts.py",
    "tests/workers/service/test_release.py",
    "tests/workers/service/test_service.py",
    "tests/workers/service/test_unheld_adapters.py",
    "tests/workers/service/test_watch.py",
    "tests/workers/speculation/test_draft_heads.py",
    "tests/workers/speculation/test_draft_models.py",
    "tests/workers/speculation/test_draft_policy.py",
    "tests/workers/speculation/test_following_steps.py",
    "tests/workers/speculation/test_ngram.py",
    "tests/workers/test_both_sides.py",
    "tests/workers/test_corrupt_kv.py",
    "tests/workers/test_races.py",
    "tests/workers/steps/test_step_loop.py",
    "tests/workers/weights/test_forms.py",
)

# Their tests start a Ray, or several. One process has them all, so that no two clusters start at a time.
RAY = (
    "tests/e2e/test_hosts.py",
    "tests/e2e/test_spanned_hosts.py",
    "tests/e2e/test_partitions.py",
    "tests/deploy/test_several_hosts.py",
    "tests/e2e/test_up.py",
    "tests/e2e/test_replace.py",
    "tests/chaos/test_ray_storm.py",
    "tests/e2e/test_launch.py",
    "tests/deploy/test_started.py",
    "tests/e2e/test_interrupted_start.py",
    "tests/e2e/test_operator.py",
    "tests/cluster/processes/test_ray_processes.py",
    "tests/cluster/processes/test_ray_watch.py",
)

# Files that take long begin first, after those of RAY.
SLOWEST = (
    "tests/e2e/test_parity.py",
    "tests/protocol/test_explorer.py",
    "tests/cache/operations/test_programs.py",
    "tests/chaos/test_storm.py",
    "tests/workers/kernels/test_megakernel.py",
    "tests/e2e/test_speculation.py",
    "tests/e2e/test_recovery.py",
)


def missing(root: Path) -> list[str]:
    """Names in this file of what is not there."""
    return [name for name in (*NOT_UNIT, *RAY, *SLOWEST) if not (root / name).exists()]


def part_of_files(root: Path, part: int, parts: int) -> list[Path]:
    """Part 0, 1, … of all test files."""
    return sorted((root / "tests").rglob("test_*.py"))[part::parts]


def is_unit(path: Path, root: Path) -> bool:
    """path: of a file or a folder."""
    return not any(path.is_relative_to(root / name) for name in NOT_UNIT)


def mark_long_cases(items: Sequence[pytest.Item]) -> list[str]:
    """Marks as long the cases that a `gate` marker leaves out. Returns its patterns that no case is like."""
    unused: dict[str, bool] = {}
    for item in items:
        marker = item.get_closest_marker("gate")
        if marker is None or not isinstance(item, pytest.Function):
            continue
        like = [fnmatchcase(item.callspec.id, pattern) for pattern in marker.args]
        if not any(like):
            item.add_marker("long")
        for pattern, one in zip(marker.args, like, strict=True):
            test = f"{item.nodeid.partition('[')[0]}, {pattern}"
            unused[test] = unused.get(test, True) and not one
    return [test for test, is_unused in unused.items() if is_unused]

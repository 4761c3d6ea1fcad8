"""`vllm serve` and its flags, typed by who comes from there: what they are called here."""

from collections.abc import Sequence

from tandem.cluster.errors import UsageError

PAGE = "docs/coming-from-vllm.md#flags"
# The words to type in their place. docs/coming-from-vllm.md has the same list, with more words.
FLAGS = {
    "--allowed-origins": "--set gateway.cors_origins=…",
    "--api-key": "--set security.api_key=…, or the variable TANDEM_API_KEY",
    "--api-server-count": "--set gateway.processes=…",
    "--block-size": "--set cache.page_size=…",
    "--chat-template": "nothing: the checkpoint's template is used",
    "--data-parallel-size": "--set num_islands=…",
    "--default-chat-template-kwargs": "nothing: requests have chat_template_kwargs",
    "--dtype": "--set model.dtype=…",
    "--enable-auto-tool-choice": "nothing: tool_choice auto works where the template shows a known format",
    "--enable-chunked-prefill": "nothing: prompts are always computed in chunks",
    "--enable-lora": "--set adapters.max_resident=…",
    "--enable-prefix-caching": "nothing: cache.prefix_sharing is on by default",
    "--enable-prompt-tokens-details": "nothing: usage always has cached_tokens",
    "--enable-request-id-headers": "nothing: X-Request-Id is always answered",
    "--enable-server-load-tracking": "nothing: /load always counts",
    "--exclude-tools-when-tool-choice-none": "nothing: tool_choice none never shows tools to the template",
    "--generation-config": "--set model.generation_config=…",
    "--gpu-memory-utilization": "--set cache.gpu_memory_utilization=…",
    "--host": "--set gateway.host=…",
    "--kv-cache-dtype": "--set cache.kv_cache_dtype=…",
    "--kv-transfer-config": "nothing: workers always transfer KV, over island.transport",
    "--load-format": "--set model.load_format=…",
    "--lora-modules": "--set 'adapters.folders={NAME: FOLDER, …}'",
    "--max-cpu-loras": "--set adapters.host_bytes=…",
    "--max-lora-rank": "--set adapters.max_rank=…",
    "--max-loras": "--set adapters.max_resident=…",
    "--max-model-len": "--set model.max_model_len=…",
    "--max-num-batched-tokens": "--set scheduler.max_batch_tokens=…",
    "--max-num-seqs": "--set scheduler.max_sequences=…",
    "--no-enable-prefix-caching": "--set cache.prefix_sharing=false",
    "--num-gpu-blocks-override": "--set cache.num_pages=…",
    "--otlp-traces-endpoint": "--set tracing.endpoint=…",
    "--port": "--http-port …",
    "--quantization": "nothing: the checkpoint says how it is quantized",
    "--reasoning-parser": "--set gateway.reasoning_parser=…",
    "--served-model-name": "--set model.served_model_name=…",
    "--speculative-config": "--set speculation.method=… and speculation.tokens=…",
    "--ssl-ca-certs": "--set security.client_ca=…",
    "--ssl-cert-reqs": "nothing: with security.client_ca clients must show a certificate",
    "--ssl-certfile": "--set security.tls_cert=…",
    "--ssl-keyfile": "--set security.tls_key=…",
    "--tensor-parallel-size": "--set island.prefill_ranks=… and --set island.decode_ranks=…",
    "--tool-call-parser": "--set gateway.tool_parser=…",
    "--trust-remote-code": "nothing: no code of a checkpoint is run",
    "-tp": "--set island.prefill_ranks=… and --set island.decode_ranks=…",
}


def check_words(words: Sequence[str], own: Sequence[str]) -> None:
    """Raises UsageError for `tandem serve`, and as check_flags() for `tandem up`. words: of the command line."""
    if words[:1] == ["serve"]:
        raise UsageError("serve is a command of vllm; here it is `tandem up CONFIG --model MODEL`")
    if words[:1] == ["up"]:
        check_flags(words[1:], own)


def check_flags(arguments: Sequence[str], own: Sequence[str]) -> None:
    """Raises UsageError with a line for each of vLLM's flags among the arguments of `tandem up`. own: the command's
    options."""
    typed = dict.fromkeys(one.partition("=")[0] for one in arguments if one.startswith("-"))
    found = {flag: known for flag in typed if (known := flag.replace("_", "-")) in FLAGS and flag not in own}
    if found:
        lines = [f"{flag} is an option of vllm serve; here it is {FLAGS[known]}" for flag, known in found.items()]
        raise UsageError("\n".join([*lines, f"{PAGE} has vLLM's other flags"]))

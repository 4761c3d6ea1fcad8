"""Reads ModelOpt's quantization_config: an algorithm for weights, and one for the KV cache."""

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.weights.formats.format import Method, Quantization, accept, read_modules

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")


def _read(section: Fields, served: str) -> Quantization:
    accept(section, "quant_algo", ALGORITHMS, served)
    accept(section, "kv_cache_quant_algo", (None, "FP8"), "KV is stored in FP8")
    unquantized = read_modules(section, "ignore") + read_modules(section, "exclude_modules")
    fp8_kv = section.raw("kv_cache_quant_algo") is not None or bool(section.section("kv_cache_scheme").names())
    return Quantization("fp8", None, unquantized, fp8_kv)


MODELOPT = Method("ModelOpt's 8-bit floats", _read)

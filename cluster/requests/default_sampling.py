"""The sampling parameters that a checkpoint advises, for requests that leave them out."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tandem.proto import inference_pb2
from tandem.workers.checkpoint.errors import InvalidConfig
from tandem.workers.checkpoint.fields import MAX_INTEGER, Fields
from tandem.workers.checkpoint.files import is_there
from tandem.workers.sampling.sampling_params import InvalidSamplingParams, SamplingParams, validate

FILE = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # those that vLLM takes, except lengths


def default_sampling(folder: Path, source: Literal["auto", "none"]) -> Mapping[str, float]:
    """Returns the parameters of generation_config.json, by their names; none without such a file or with source "none".

    Its do_sample changes nothing, as in vLLM. Raises InvalidConfig for a value that no request may have.
    """
    path = folder / FILE
    if source == "none" or not is_there(path):
        return {}
    fields = Fields.from_file(path)
    found: dict[str, float] = {}
    for name in FIELDS:
        if name == "top_k" and name in fields and fields.raw(name) != -1:
            found[name] = fields.integer(name, maximum=MAX_INTEGER)
        elif name != "top_k" and name in fields:
            found[name] = fields.number(name)
    try:
        validate(replace(SamplingParams(), **found), 1)  # type: ignore[arg-type]  # names and types as above
    except InvalidSamplingParams as error:
        raise InvalidConfig(f"{path}: {error}; with model.generation_config: none it is not read") from None
    return found


def with_defaults(
    params: SamplingParams, said: inference_pb2.SamplingParams, defaults: Mapping[str, float]
) -> SamplingParams:
    """Fills in the defaults. params: the parameters of the message `said`, which keep what the message sets."""
    given = {name: value for name, value in defaults.items() if not said.HasField(name)}  # type: ignore[arg-type]
    return replace(params, **given) if given else params  # type: ignore[arg-type]

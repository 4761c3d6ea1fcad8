"""Settings of gateways that tests start."""

from concurrent.futures import Future

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.gateway.settings import GatewaySettings
from tandem.cluster.requests.model_limits import ModelLimits
from tandem.cluster.served_model import ServedModel
from tandem.cluster.supervision.process_settings import gateway_settings

NO_MODEL = ServedModel("none", "float32", 1, 1, (), ModelLimits(vocab_size=1, max_model_len=64, pool_tokens=128))
"""The model of fake gateways, which serve nothing."""


def settings_of(config: ClusterConfig, max_model_len: int, num_pages: int) -> GatewaySettings:
    """Returns the settings of the first process, for the model of `config` in pools of num_pages."""
    return gateway_settings(config, ServedModel.of_config(config, max_model_len, num_pages))


def known(num_pages: int) -> Future[int]:
    """Makes the number of pages as a gateway's supervisor waits for it."""
    pages: Future[int] = Future()
    pages.set_result(num_pages)
    return pages

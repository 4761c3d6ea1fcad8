"""The reasons why a checkpoint cannot be served. Each error names the file or field, its value and what it must be."""


class ModelError(Exception):
    """Base of all errors about a checkpoint."""


class CheckpointMissing(ModelError):
    """A folder or a file of the checkpoint is not there."""


class NotFetched(CheckpointMissing):
    """A file holds a Git LFS pointer: the clone left the file itself on the server."""


class InvalidConfig(ModelError):
    """A JSON file or a field of it cannot be used as it is."""


class UnknownArchitecture(ModelError):
    """No family serves the architecture that config.json names."""


class UnsupportedFeature(ModelError):
    """The config asks for something that its family could have, but that is not implemented."""


class InvalidWeights(ModelError):
    """Tensors are missing, unexpected, misshapen or cut short."""


class InvalidTokenizer(ModelError):
    """The tokenizer or its chat template cannot be loaded."""

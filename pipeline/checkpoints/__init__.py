"""Where a model's files come from: a local folder, S3 or the hub; pinned by the driver, fetched once per node.

May import storage, config, messages and the engine's checks of a checkpoint; loads no weights.
"""

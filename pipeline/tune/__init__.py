"""How a checkpoint is trained along the inference path: plan, train, save.

Imports runtime, storage, config and the engine. Only `workers` imports ray.
"""

"""A training in processes of a Ray cluster, by Ray Train: data parallel, gradients averaged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pipeline.config.tune import TuneConfig
from pipeline.tune import resume
from pipeline.tune.fit import check_fits
from pipeline.tune.plan import plan_training
from pipeline.tune.train import train


def train_in_workers(config: TuneConfig, recorded: TuneConfig) -> None:
    """Run `train` in `workers.count` processes, which must all reach the data, the checkpoint and the output.

    If a worker dies, all start again from the last saved step, up to three times. recorded: as in `train`.

    Raises:
        UserError: the cluster is too small for the workers.
        RuntimeError: training failed.
        KeyboardInterrupt: it was interrupted.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    workers = config.workers
    assert workers is not None and workers.address is not None
    resolved = absolute(config)
    owns_ray = not ray.is_initialized()
    if owns_ray:
        ray.init(address=workers.address, logging_level=logging.ERROR)
    try:
        check_fits(workers, ray.cluster_resources(), "the cluster")
        TorchTrainer(
            work,
            train_loop_config={
                "config": resolved.model_dump(exclude_unset=True),
                "recorded": recorded.model_dump(exclude_unset=True),
            },
            torch_config=TorchConfig(backend="nccl" if workers.gpus else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=workers.count,
                use_gpu=workers.gpus > 0,
                resources_per_worker={"CPU": workers.cpus, **({"GPU": workers.gpus} if workers.gpus else {})},
            ),
            run_config=RunConfig(
                name="ray",
                storage_path=str(resume.folder(resolved)),
                failure_config=FailureConfig(max_failures=3),
            ),
        ).fit()
    except SystemExit:  # Ray Train ends so after an interrupt
        raise KeyboardInterrupt from None
    except (TrainingFailedError, ray.exceptions.RayError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else type(error).__name__) from error
    finally:
        if owns_ray:
            ray.shutdown()


def work(options: dict[str, Any]) -> None:
    """One worker's part; options: `config` and `recorded` of `train`, as values."""
    config = TuneConfig.model_validate(options["config"])
    train(config, plan_training(config), recorded=TuneConfig.model_validate(options["recorded"]))


def absolute(config: TuneConfig) -> TuneConfig:
    """The config with absolute local paths: a worker has a working directory of its own."""

    def of(path: str | None) -> str | None:
        return None if path is None else str(Path(path).absolute())

    data = config.data.model_copy(
        update={
            "train": [of(path) for path in config.data.train],
            "dev": [of(path) for path in config.data.dev],
        }
    )
    adapter = config.adapter
    if adapter is not None:
        adapter = adapter.model_copy(update={"start": of(adapter.start)})
    return config.model_copy(
        update={
            "adapter": adapter,
            "data": data,
            "model": config.model.model_copy(update={"path": of(config.model.path)}),
            "loss": config.loss.model_copy(update={"teacher": of(config.loss.teacher)}),
            "output": of(config.output),
        }
    )

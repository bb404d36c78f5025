"""Runs the stages on Ray Data: tasks that read and prepare shards, and a pool of actors that answer and commit them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, Dataset, Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.engine.machine import process_cpus, process_memory
from pipeline import metrics
from pipeline.answer.coordinator import Coordinator, Workload
from pipeline.config.job import ActorsConfig
from pipeline.input.files import InputFile
from pipeline.input.shards import Shard, group_shards
from pipeline.messages import one_line
from pipeline.report.progress import shown_progress
from pipeline.run.ray_session import actor_cpus, check_metrics_port, is_own_ray, ray_session, smallest_node
from pipeline.run.remote import RayWorker, RemoteCoordinator, ray_sink
from pipeline.run.stages import QUARANTINED_RETRIES, Backend, Prepare, Stages
from pipeline.runtime.isolated import Died, call_isolated
from pipeline.runtime.signals import Interrupted, graceful

Result = TypeVar("Result")
ISOLATED_SECONDS = 300.0  # time limit of an isolated call during planning
TASK_CPUS = 0  # CPUs that a prepare task requests: none, because actors or another dataset may hold all CPUs
TASKS_OF_ACTOR = {"cpu": 1, "gpu": 4}  # maximum running prepare tasks per actor; each has its own process
TASK_ROWS, TASK_BYTES = 50_000, 512 * 2**20  # limits of a prepare task, see `ShardSource`
SHARDS_OF_ACTOR = 2  # minimum number of shards sent to an actor: while one is at work, the next one waits there
CALL_RETRIES = 1  # retries of a call whose process died, e.g. with its node


class RayData(Backend):
    """Runs jobs on Ray: over the caller's connection, else on the cluster in RAY_ADDRESS, else on a local Ray.

    metrics_port: port on which a local Ray serves metrics; None: a free port. Raises UserError if the port is taken.
    """

    starts_workers = True

    def __init__(self, *, verbose: bool = False, metrics_port: int | None = None) -> None:
        self.verbose, self.metrics_port = verbose, metrics_port
        if metrics_port is not None:
            check_metrics_port(metrics_port)

    @property
    def on_this_machine(self) -> bool:
        return is_own_ray()

    def node(self, actors: ActorsConfig) -> tuple[int, int, int]:
        return (process_cpus(), process_memory(), 1) if is_own_ray() else smallest_node(actors)

    def call_isolated(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return call_isolated(function, *arguments, seconds=ISOLATED_SECONDS, memory_bytes=process_memory() // 2)

    def call_as_actors(
        self, actors: ActorsConfig, function: Callable[..., Result], calls: Sequence[tuple[Any, ...]]
    ) -> list[Result]:
        with self.ready(actors):
            remote: Any = ray.remote(num_cpus=actor_cpus(actors), num_gpus=actors.gpus, max_retries=CALL_RETRIES)
            task = remote(function)
            try:
                results: list[Result] = ray.get([task.remote(*arguments) for arguments in calls])
            except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
                raise Died(one_line(error)) from None
            return results

    def ready(self, actors: ActorsConfig) -> AbstractContextManager[None]:
        return ray_session(actors, self.verbose, self.metrics_port)

    @contextmanager
    def session(self, actors: ActorsConfig, output: str) -> Iterator[RaySession]:
        with self.ready(actors):
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            # run the coordinator on the driver's node, so that it does not die with another node
            handle = ray.remote(num_cpus=0)(Coordinator).options(scheduling_strategy=here).remote()
            try:
                yield RaySession(cast(Coordinator, RemoteCoordinator(handle)), output, verbose=self.verbose)
            finally:
                ray.kill(cast(Any, handle))


class RaySession:
    """A `Session` on Ray."""

    def __init__(self, coordinator: Coordinator, output: str, *, verbose: bool) -> None:
        self.coordinator, self.worker = coordinator, RayWorker(output)
        self.output, self.verbose = output, verbose

    def run(self, stages: Stages, workload: Workload, grace_seconds: float) -> None:
        """Run the stages to their end (see `Session.run`). Raises RayError if a task failed after all retries."""
        batches = _dataset(stages, self.output, verbose=self.verbose)
        with (
            metrics.installed(ray_sink(self.output)),
            shown_progress(self.coordinator, workload),
            graceful(grace_seconds, _or_empty(self.coordinator.stop), _or_empty(self.coordinator.working)) as grace,
        ):
            try:
                for _ in batches.iter_internal_ref_bundles():
                    pass
            except ray.exceptions.RayError:
                if grace.signal is None:
                    raise
                # report the signal instead: it reached the whole process group, so it stopped Ray's processes too
                raise Interrupted(grace.signal) from None
        if grace.signal is not None:  # some shards are left for the next run
            raise Interrupted(grace.signal)


def _or_empty(method: Callable[[], set[int]]) -> Callable[[], set[int]]:
    """Wrap a method of the coordinator so that it returns an empty set if the coordinator does not answer."""

    def call() -> set[int]:
        try:
            return method()
        except (ray.exceptions.RayError, TimeoutError):
            return set()

    return call


def _dataset(stages: Stages, output: str, *, verbose: bool) -> Dataset:
    """Return the lazy dataset that runs all stages. output: the job's output folder, which labels metrics."""
    # put `prepare` into the object store once, because tasks hold copies of what they refer to
    call = partial(_prepared, ray.put(stages.prepare), output)
    source = ShardSource(call, stages.shards, stages.files, TASK_ROWS, TASK_BYTES)
    actors, place = stages.actors, _place()
    most = max(2, actors.most * TASKS_OF_ACTOR["gpu" if actors.gpus else "cpu"])  # maximum running tasks
    with warnings.catch_warnings():
        # use the deprecated max_retries: without it, Ray Data retries a task without limit if its process dies
        warnings.simplefilter("ignore", ray.util.annotations.RayDeprecationWarning)
        batches: Dataset = ray.data.read_datasource(
            source,
            num_cpus=TASK_CPUS,
            concurrency=min(most, len(source.tasks)),
            override_num_blocks=1,
            ray_remote_args={"max_retries": QUARANTINED_RETRIES, **place},
        )
        context = batches.context  # a copy of the caller's context, which the dataset below inherits
        # size 1 makes each shard a separate block; override_num_blocks=1 above keeps blocks whole. `repartition` would
        # need a whole CPU, and another dataset of the cluster may hold all CPUs
        context.target_max_block_size = 1
        context.enable_progress_bars = context.print_on_execution_start = verbose
        # Ray divides an actor's load by `calls`, so divide the thresholds too: all calls but one may only wait
        context.autoscaling_config.actor_pool_util_upscaling_threshold /= stages.calls
        context.autoscaling_config.actor_pool_util_downscaling_threshold /= stages.calls
        context.execution_no_progress_timeout_s = -1  # never fail because a shard is slow
        context.raise_original_map_exception = True  # else the last line of an error is "UDF failed"
        sizes = {"size": actors.most} if actors.min is None else {"min_size": actors.min, "max_size": actors.max}
        threads = {"max_concurrent_calls_per_actor": stages.calls, "enable_true_multi_threading": True}
        pool: dict[str, Any] = {**sizes, **(threads if stages.calls > 1 else {})}
        return batches.map_batches(
            cast(Any, stages.generator),
            fn_constructor_kwargs=dict(stages.arguments),
            compute=ActorPoolStrategy(max_tasks_in_flight_per_actor=max(SHARDS_OF_ACTOR, stages.calls), **pool),
            batch_size=1,
            batch_format="numpy",
            num_cpus=actor_cpus(actors),
            num_gpus=actors.gpus or None,
            max_restarts=-1,  # no limit here: the coordinator limits how often actors die during loading
            max_task_retries=QUARANTINED_RETRIES,
        )


class ShardSource(Datasource):
    """Ray Data source whose blocks are prepared shards.

    A task calls `prepare` with consecutive shards of one file: at most `task_rows` rows and `task_bytes` bytes, or more
    if a single shard, row group or gzip file is larger.
    """

    def __init__(
        self,
        prepare: Prepare,
        shards: Sequence[Shard],
        files: Sequence[InputFile],
        task_rows: int,
        task_bytes: int,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.prepare, self.files = prepare, {file.url: file for file in files}
        self.tasks = group_shards(shards, files, task_rows, task_bytes)

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        return [
            ReadTask(  # does not refer to self, which would be pickled into every task
                partial(self.prepare, shards, [self.files[shards[0].url]]),
                BlockMetadata(len(shards), size_bytes=None, input_files=(shards[0].url,), exec_stats=None),
            )
            for shards in self.tasks
        ]


def _prepared(
    prepare: ray.ObjectRef[Prepare], output: str, shards: Sequence[Shard], files: Sequence[InputFile]
) -> Iterator[pa.Table]:
    """Read and prepare the shards of a task, in a worker process."""
    metrics.install(ray_sink(output))
    yield from ray.get(prepare)(shards, files)


def _place() -> dict[str, Any]:
    """Return Ray options that keep tasks off nodes without CPUs (e.g. a head node), although tasks request no CPUs."""
    without = [node["NodeID"] for node in ray.nodes() if node["Alive"] and not node["Resources"].get("CPU")]
    return {"label_selector": {"ray.io/node-id": f"!in({','.join(without)})"}} if without else {}

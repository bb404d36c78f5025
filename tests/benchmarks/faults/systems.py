"""The same job for each system: 4,000 prompts of 8 Parquet files are answered by two processes.

    python systems.py SYSTEM TASK.json [options of the system's own command]

runs in the environment of that system, as its documentation says for a job that is to be resumed. A stand-in takes the
model's place: its answer follows from the prompt. Blocks of 100 rows wherever a system has such a size.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
ROWS, FILES, BLOCK = 4_000, 8, 100
SECONDS_A_ROW = 0.002
NODE_CPUS = 3  # of each node of a cluster: room for one process that answers
POISON = "[poison]"  # in the prompt that kills its process


@dataclass(frozen=True)
class Task:
    """Where a job reads and writes.

    Args:
        input: folder of Parquet files with columns id and prompt.
        output: folder, or URL of a bucket's folder; the Parquet files in it are what a consumer reads.
        state: folder or URL for what a system keeps beside the output.
        computed: folder with a file for each process that answers rows, one byte a row.
        endpoint: of the bucket, or "".
    """

    input: str
    output: str
    state: str
    computed: str
    endpoint: str = ""


def reply(prompt: str) -> str:
    """The stand-in's answer."""
    return f"{prompt} is answered by {sha256(prompt.encode()).hexdigest()}"


def answered(task: Task, prompts: list[str]) -> list[str]:
    """What a model does: takes its time, may die of a row, leaves a trace."""
    if any(POISON in prompt for prompt in prompts):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SECONDS_A_ROW * len(prompts))
    with open(Path(task.computed, str(os.getpid())), "ab", buffering=0) as trace:
        trace.write(b"." * len(prompts))
    return [reply(prompt) for prompt in prompts]


def this_project(task: Task, *options: str) -> None:
    """`skipdecode run`: the same command resumes. All but the engine is the real job's."""
    from pipeline.cli.app import main
    from pipeline.run import stages

    class WithStandIn(stages.ShardGenerator):  # type: ignore[name-defined, misc]
        """Pickled by value, for workers cannot import this file."""

        def __init__(self, *rest: Any, **named: Any) -> None:
            import pipeline.answer.stage

            pipeline.answer.stage.Generator = stand_in(task)
            super().__init__(*rest, **named)

    stages.ShardGenerator = WithStandIn  # type: ignore[attr-defined]
    cluster = "RAY_ADDRESS" in os.environ
    job = {
        "input": {"path": task.input, "id": "id"},
        "output": {"path": task.output},
        "model": {"path": str(ROOT / "configs/demo/checkpoint"), "dtype": "float32"},
        "actors": {"count": 2, "threads": 1, **({"cpus": NODE_CPUS - 1} if cluster else {})},
        "shard_rows": BLOCK,
        "shared_prefix": False,
        "max_error_rate": 0.01,
        "storage": {"endpoint_url": task.endpoint} if task.endpoint else {},
    }
    file = Path(task.computed).with_name("job.yaml")
    if not file.exists():
        file.write_text(json.dumps(job))
    sys.argv = ["skipdecode", "run", str(file), *options]
    main()


def stand_in(task: Task) -> type:
    """A Generator of this project that answers without a model, by the prompt's text."""
    sys.path.append(str(ROOT / "tests/benchmarks"))
    from fake_engine import FakeGenerator
    from tokenizers import Tokenizer

    class StandIn(FakeGenerator):
        def __init__(self, settings: Any) -> None:
            self.tokenizer = Tokenizer.from_file(f"{settings.checkpoint}/tokenizer.json")

        def run(self, work: Any) -> None:
            left = [row for row, prompt in enumerate(work.prompts) if prompt.error is None]
            while left:
                batch, left = left[: BLOCK // 2], left[BLOCK // 2 :]
                work.on_batch(batch)
                texts = answered(task, [self.tokenizer.decode(work.prompts[row].ids).strip() for row in batch])
                work.texts |= dict(zip(batch, texts, strict=True))
            work.on_batch(())

    return StandIn


def ray_data(task: Task, checkpoint: bool = False) -> None:
    """Ray Data. Without a checkpoint nothing is documented for resuming, and `write_parquet` appends."""
    import pyarrow.fs
    import ray
    from ray.data.checkpoint import CheckpointConfig

    cluster = "RAY_ADDRESS" in os.environ
    # with 3 CPUs a finished job with a checkpoint, repeated, does not end: its filter takes the last one
    where = {"address": os.environ["RAY_ADDRESS"]} if cluster else {"address": "local", "num_cpus": 4}
    ray.init(include_dashboard=None if cluster else False, **where)
    context = ray.data.DataContext.get_current()
    context.target_max_block_size = 12_000  # about 100 rows; without it all rows are one block and one file
    store = None
    if task.endpoint:
        store = pyarrow.fs.S3FileSystem(endpoint_override=task.endpoint, allow_bucket_creation=False)
    if checkpoint:
        context.checkpoint_config = CheckpointConfig(
            id_column="id",
            checkpoint_path=task.state,
            delete_checkpoint_on_success=False,  # or a finished job, repeated, answers all again
            override_filesystem=store,
        )

    class Answers:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"id": batch["id"], "generated_text": answered(task, list(batch["prompt"]))}

    rows = ray.data.read_parquet(task.input)
    pool = ray.data.ActorPoolStrategy(size=2)
    answers = rows.map_batches(Answers, batch_size=BLOCK // 2, compute=pool, num_cpus=NODE_CPUS - 1 if cluster else 1)
    answers.write_parquet(task.output.removeprefix("s3://" if store else ""), filesystem=store)


def ray_data_checkpoint(task: Task) -> None:
    """Ray Data with `CheckpointConfig`: rows whose id is recorded are left out."""
    ray_data(task, checkpoint=True)


def daft(task: Task) -> None:
    """Daft on its native runner: nothing is documented for resuming, and `write_parquet` appends."""
    import daft as library

    library.set_runner_native()
    store = None
    if task.endpoint:
        keys = {"key_id": "test", "access_key": "test", "region_name": "us-east-1"}
        s3 = library.io.S3Config(endpoint_url=task.endpoint, use_ssl=False, **keys)
        store = library.io.IOConfig(s3=s3)

    @library.udf(return_dtype=library.DataType.string(), concurrency=2, use_process=True, batch_size=BLOCK // 2)
    class Answers:
        def __init__(self) -> None:
            pass

        def __call__(self, prompts: Any) -> list[str]:
            return answered(task, prompts.to_pylist())

    rows = library.read_parquet(f"{task.input}/*.parquet")
    rows.select("id", Answers(rows["prompt"]).alias("generated_text")).write_parquet(task.output, io_config=store)
    sys.stdout.flush()
    os._exit(0)  # else Python ends with status 134 behind processes of a UDF, though all is written


def datatrove(task: Task) -> None:
    """datatrove's `InferenceRunner` with local checkpoints: completed tasks and cached requests are left out."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
    from datatrove.pipeline.inference.servers import dummy_server
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.writers import ParquetWriter

    def post(handler: Any) -> None:
        asked = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        [text] = answered(task, [asked["messages"][0]["content"]])
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        body = json.dumps({"choices": [choice], "usage": usage}).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def in_the_server() -> dict[str, Any]:
        """Called in each worker: the stand-in in datatrove's own server of debugging runs."""
        dummy_server.DummyHandler.do_POST = post
        return {}

    async def rollout(document: Any, generate: Any) -> str:
        return str((await generate({"messages": [{"role": "user", "content": document.text}]})).text)

    def row(_: Any, document: Any) -> dict[str, str]:
        return {"id": document.id, "generated_text": document.metadata["rollout_results"][0]}

    if task.endpoint:
        os.environ["AWS_ENDPOINT_URL"] = task.endpoint  # its file systems take no other hint
    chunks = str(Path(task.computed).with_name("chunks")) if task.endpoint else f"{task.state}/chunks"
    settings = InferenceConfig("dummy", "dummy", max_concurrent_generations=8, server_ready_delay_sec=0.2)
    LocalPipelineExecutor(
        pipeline=[
            ParquetReader(task.input, text_key="prompt", id_key="id"),
            InferenceRunner(
                rollout,
                settings,
                ParquetWriter(task.output, output_filename="${rank}_chunk_${chunk_index}.parquet", adapter=row),
                in_the_server,
                checkpoints_local_dir=chunks,
                records_per_chunk=BLOCK,
            ),
        ],
        logging_dir=f"{task.state}/logs",
        tasks=FILES,
        workers=2,
    ).run()


@dataclass(frozen=True)
class System:
    """A system under test.

    Args:
        run: the job, called in the system's environment.
        environment: folder of `work/peers` where it is installed; "" for this project's own.
        packages: that the job depends on.
        promised: faults after which its documentation promises that nothing is lost or repeated.
        nodes: of which the job may have more than one.
    """

    run: Callable[..., None]
    environment: str
    packages: str
    promised: Collection[str]
    nodes: bool = False


ALL = ("kill", "term", "worker", "poison", "disk", "twice", "flip", "stop60", "stop90", "store", "node")
RECORDED = ("kill", "term", "worker", "disk", "node")
SYSTEMS = {
    "this project": System(this_project, "", "skipdecode ray pyarrow", ALL, nodes=True),
    "Ray Data": System(ray_data, "ray-data", "ray pyarrow", ("worker", "node"), nodes=True),
    "Ray Data, checkpoint": System(ray_data_checkpoint, "ray-data", "ray pyarrow", RECORDED, nodes=True),
    "Daft": System(daft, "daft", "daft pyarrow", ()),
    "datatrove": System(datatrove, "datatrove", "datatrove pyarrow", ("kill", "term", "disk")),
}

if __name__ == "__main__":
    SYSTEMS[sys.argv[1]].run(Task(**json.loads(Path(sys.argv[2]).read_text())), *sys.argv[3:])

"""Adds SkipDecode to vLLM: a worker, two schedulers, and a loader that leaves out layers and merges a speed adapter.

vLLM imports the classes that its arguments name. Outside this folder, only tests import vLLM.

    LLM(model, worker_cls="actors.vllm.worker.SkipWorker",
        scheduler_cls="actors.vllm.scheduler.SkipAsyncScheduler", additional_config={"skipdecode": {"speedup": 2}})

A schedule that falls also needs enforce_eager=True.
"""

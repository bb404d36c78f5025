"""Adds SkipDecode to vLLM: a worker, two schedulers, and a loader that merges a speed adapter.

vLLM imports the classes that its arguments name. Outside this folder, only tests import vLLM.

    LLM(model, enforce_eager=True, worker_cls="actors.vllm.worker.SkipWorker",
        scheduler_cls="actors.vllm.scheduler.SkipAsyncScheduler", additional_config={"skipdecode": {"speedup": 2}})
"""

"""Ray Serve LLM with SkipDecode at 2x: python ray_serve_llm.py MODEL SPEED_ADAPTER PORT"""

import json
import sys

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

model, adapter, port = sys.argv[1:4]
ray.init(address="local", num_cpus=4, include_dashboard=False)  # one for the ingress, two for the replica
config = LLMConfig(
    model_loading_config={"model_id": "model", "model_source": model},
    engine_kwargs={
        "worker_cls": "actors.vllm.worker.SkipWorker",
        "scheduler_cls": "actors.vllm.scheduler.SkipAsyncScheduler",
        "additional_config": {"skipdecode": {"speed_adapter": adapter, "speedup": 2, "decay": "constant"}},
        **json.loads(sys.argv[4] if len(sys.argv) > 4 else "{}"),  # further ones of vLLM
    },
    placement_group_config={"bundles": [{"CPU": 1}]},  # on a GPU left out
    deployment_config={"num_replicas": 1},
)
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
serve.run(build_openai_app({"llm_configs": [config]}), blocking=True)

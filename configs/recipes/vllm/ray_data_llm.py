"""SkipDecode's add-on in `ray.data.llm`: python ray_data_llm.py MODEL SPEED_ADAPTER"""

import json
import sys

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

SYSTEM = "You write one short paragraph that describes a place from the given facts, and uses every fact."
FACTS = [
    "name[The Plough], eatType[pub], food[French], priceRange[less than £20], customer rating[high]",
    "name[Alimentum], area[city centre], familyFriendly[no]",
]

model, adapter = sys.argv[1:3]
ray.init(address="local", num_cpus=3, include_dashboard=False, logging_level="error")
config = vLLMEngineProcessorConfig(
    model_source=model,
    engine_kwargs={
        "worker_cls": "actors.vllm.worker.SkipWorker",
        "scheduler_cls": "actors.vllm.scheduler.SkipAsyncScheduler",
        "additional_config": {"skipdecode": {"speed_adapter": adapter, "speedup": 2, "decay": "constant"}},
        **json.loads(sys.argv[3] if len(sys.argv) > 3 else "{}"),  # further ones of vLLM
    },
    placement_group_config={"bundle_per_worker": {"CPU": 1}},  # on a GPU left out
    concurrency=1,
    batch_size=4,
)
processor = build_processor(
    config,
    preprocess=lambda row: {**row, "sampling_params": {"temperature": 0, "max_tokens": 48}},
    postprocess=lambda row: {"row": row["row"], "answer": row["generated_text"]},
)
chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": facts}] for facts in FACTS]
rows = ray.data.from_items([{"row": row, "messages": chat} for row, chat in enumerate(chats)])
for answer in sorted(processor(rows).take_all(), key=lambda answer: answer["row"]):
    print(json.dumps(answer))

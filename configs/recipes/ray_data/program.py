"""`Generator` in a Ray Data program of your own: python configs/recipes/ray_data/program.py"""

import ray
from ray.data import ActorPoolStrategy

from skipdecode import EngineSettings, Generator


def main() -> None:
    """Answer four prompts."""
    facts = [f"name[{name}], eatType[pub], area[riverside]" for name in ("Zizzi", "Cotto", "Aromi", "The Mill")]
    prompts = ray.data.from_items([{"prompt": prompt} for prompt in facts])
    settings = EngineSettings("configs/demo/checkpoint", schedule={"speedup": 3}, sampling={"max_new_tokens": 48})
    answers = prompts.map_batches(
        Generator,
        fn_constructor_args=[settings],
        compute=ActorPoolStrategy(size=1),
        batch_size=256,
        num_cpus=0,  # actors that take every CPU leave none to read the prompts; on GPUs: num_gpus=1
    )
    for row in answers.take_all():
        print(row["generated_text"])


if __name__ == "__main__":
    main()

"""Merge a LoRA adapter into its model: python configs/recipes/lora/merge.py MODEL ADAPTER FOLDER"""

import shutil
import sys

from peft import PeftModel
from transformers import AutoModelForCausalLM

model, adapter, folder = sys.argv[1:]
base = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
# the tokenizer's files; skipdecode.json says what the base was trained for, not the merged model
shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*", "skipdecode.json"), dirs_exist_ok=True)
PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder)

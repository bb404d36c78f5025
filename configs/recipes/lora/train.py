"""Train a small LoRA adapter that stands for yours: python configs/recipes/lora/train.py MODEL FOLDER"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = {
    "Is the blue lamp in stock?": "Yes, we have the blue lamp. Yours, the Lamp Shop",
    "Can I return a bulb?": "Yes, within thirty days. Yours, the Lamp Shop",
    "When do you open?": "We open at nine. Yours, the Lamp Shop",
    "Do you repair old lamps?": "No, we only sell new ones. Yours, the Lamp Shop",
}

model, folder = sys.argv[1:]
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(model)
settings = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
trained = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype="float32"), settings)
optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
for question, answer in 6 * list(EXAMPLES.items()):
    texts = {"system": "You answer for a lamp shop.", "user": question, "assistant": answer}
    chat = [{"role": role, "content": text} for role, text in texts.items()]
    tokens = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
    trained(**tokens, labels=tokens["input_ids"]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
trained.save_pretrained(folder)

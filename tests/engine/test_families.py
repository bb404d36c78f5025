"""What is a family's own: its logits, its windows and caps, its attention when loaded, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import answer, requests
from tiny_models import CONTEXT, LAYERS, MODELS, WINDOW, tiny_model
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from actors.engine.decoder import Decoder, causal_mask
from actors.engine.engine import Engine
from actors.engine.model.families import ACTIVATIONS, FAMILIES, ROPE_TYPES, family_of
from actors.engine.model.loading import load_decoder
from actors.engine.schedule.schedule import ScheduleSpec

FULL = ScheduleSpec().build(LAYERS)
IDS = torch.tensor([[7, 50, 3, 91, 22, 8, 64, 17, 80, 5, 33, 41], [90, 4, 71, 12, 9, 60, 31, 2, 77, 18, 6, 55]])
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
# as the checkpoints on the Hub have it
ON_THE_HUB = {"rope_scaling": {**LONG, "type": "longrope"}, "original_max_position_embeddings": 24}


class Recorder:
    """A store in which rows may have a past, kept the plain way: by concatenation."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self.held:
            old = self.held[layer_idx]
            keys, values = torch.cat([old[0], keys], dim=2), torch.cat([old[1], values], dim=2)
        self.held[layer_idx] = keys, values
        return keys, values


def prefill(decoder: Decoder, store: Any, first: int, end: int) -> torch.Tensor:
    """Logits behind column end - 1 of IDS; the columns before `first` are in the store."""
    places = torch.arange(first, end).expand(len(IDS), -1)
    last = torch.full((len(IDS),), end - first - 1)
    return decoder.prefill(IDS[:, first:end], places, last, range(LAYERS), store, prefix_columns=first)


@torch.inference_mode()
def test_logits_are_the_librarys(decoder: Decoder, library: Decoder) -> None:
    """A greedy token hides a cap or a scale of the logits; this does not."""
    want = library.model(IDS).logits
    for columns in (1, WINDOW, IDS.shape[1]):
        torch.testing.assert_close(prefill(decoder, Recorder(), 0, columns), want[:, columns - 1], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("first", [1, WINDOW, 9])
@torch.inference_mode()
def test_a_prefill_goes_on_from_a_prefix(decoder: Decoder, first: int) -> None:
    want = prefill(decoder, Recorder(), 0, IDS.shape[1])
    store = Recorder()
    prefill(decoder, store, 0, first)
    torch.testing.assert_close(prefill(decoder, store, first, IDS.shape[1]), want, rtol=1e-3, atol=2e-4)


def test_a_mask_is_what_the_librarys_windows_say() -> None:
    """transformers.masking_utils: kv_idx <= q_idx and kv_idx > q_idx - sliding_window."""
    mask = causal_mask(4, 3, 2, torch.device("cpu"))[0, 0]
    assert mask.int().tolist() == [
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]
    assert torch.equal(causal_mask(4, 0, None, torch.device("cpu"))[0, 0], torch.ones(4, 4).tril().bool())


@pytest.mark.parametrize("name", [name for name, (_, keys) in MODELS.items() if keys.get("sliding_window")])
@torch.inference_mode()
def test_windows_of_the_tiny_models_bite(name: str) -> None:
    """Without this the other tests could pass with no window at all."""
    decoder = Decoder(tiny_model(name))
    assert any(decoder.windows)
    near = prefill(decoder, Recorder(), 0, IDS.shape[1])
    decoder.windows = [None] * LAYERS
    assert (prefill(decoder, Recorder(), 0, IDS.shape[1]) - near).abs().max() > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_checkpoint_answers_as_the_model_in_memory(name: str, tmp_path: Path) -> None:
    """`load_decoder` chooses the attention that the family asks for."""
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    loaded = load_decoder(tmp_path, torch.float32, torch.device("cpu"))
    assert loaded.model.config._attn_implementation == FAMILIES[model.config.model_type].attention
    rows = requests(3, seed=10, sampled=True)
    got, want = (answer(Engine(one, FULL, {2}), rows) for one in (loaded, Decoder(model)))
    assert [one.token_ids for one in got] == [one.token_ids for one in want]


@pytest.mark.parametrize(
    ("name", "changes", "limit"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}}, CONTEXT),
        ("llama", {"rope_parameters": {**LONG, "rope_theta": 100.0, "original_max_position_embeddings": 24}}, 24),
        ("phi3", {**ON_THE_HUB, "partial_rotary_factor": 1.0}, 24),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 3.5, "original_max_position_embeddings": 24}}, 84),
    ],
    ids=["dynamic", "longrope", "phi3-longrope", "yarn"],
)
def test_rows_end_at_the_context_of_their_rotary_type(name: str, changes: dict[str, Any], limit: int) -> None:
    decoder = Decoder(tiny_model(name, **changes))
    assert decoder.context_length == limit
    rows = requests(6, seed=11, most_new=60)
    for row, got in zip(rows, answer(Engine(decoder, FULL, {2}), rows, max_rows=4), strict=True):
        prompt = torch.tensor([list(row.prompt_ids)])
        new = min(row.sampling.max_new_tokens, limit - prompt.shape[1])
        want = decoder.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False
        )
        assert list(got.token_ids) == want[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("model_type", "keys", "reason"),
    [
        ("bloom", {}, "'bloom' is not supported; supported: llama, mistral, "),
        ("gemma3", {}, r"'gemma3' is not supported.*of Gemma 3 only the text models \(gemma3_text\)$"),
        ("mixtral", {}, "'mixtral' is not supported"),
        ("gpt_oss", {}, "'gpt_oss' is not supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "'gemma2': use_bidirectional_attention"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "'gemma3_text': use_bidirectional_attention"),
        ("gpt2", {"add_cross_attention": True}, "'gpt2': add_cross_attention"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 36}, "'smollm3': .* but sliding_window is null"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 32}, "'qwen3': layer_types has 'chunked_attention'"),
        ("llama", {"layer_types": ["linear_attention"] * 32}, "'llama': layer_types has 'linear_attention'"),
        ("llama", {"layer_types": ["sliding_attention"] * 32}, "'llama': .*sliding_attention.* sliding_window is null"),
        ("mistral", {"layer_types": ["full_attention"] * 32}, "'mistral': .* but transformers uses sliding_window for"),
        ("llama", {"hidden_act": "snake"}, "'llama': hidden_act = 'snake': supported: silu, "),
        ("gpt2", {"activation_function": "snake"}, "'gpt2': activation_function = 'snake': supported: silu, "),
        ("gemma2", {"hidden_activation": "snake"}, "'gemma2': hidden_activation = 'snake'"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "mrope", "factor": 2.0}},
            "'llama': rope_type = 'mrope': supported: d",
        ),
    ],
)
def test_what_cannot_be_run_exactly_is_refused_by_name(model_type: str, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        family_of(AutoConfig.for_model(model_type, **keys))
    assert "\n" not in str(caught.value)


def test_the_library_knows_the_listed_values() -> None:
    assert {*ACTIVATIONS} <= {*ACT2FN} and {*ROPE_TYPES} <= {"default", *ROPE_INIT_FUNCTIONS}


def test_every_family_has_a_tiny_model() -> None:
    assert {model_type for model_type, _ in MODELS.values()} == set(FAMILIES)

"""Parts of the benchmarks: peers, pruning, the least time of a run, topics, values stated, pictures, data sets."""

from __future__ import annotations

import argparse
import base64
import functools
import io
import json
import math
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import contestants
import fetch_data
import pictures
import predict
import pyarrow.parquet as pq
import pytest
import torch
from contestants import HERE, Peer, PeerEnded
from ideal import Ceilings, Least, Shape, least, taken_off
from overhead import write_rows
from real_data import TOPICS, Similar, topic_of
from real_evidence import prune
from real_model import values_of, values_stated
from shapes import SHAPES, write_unfilled
from tiny_models import LAYERS, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm_speed import LINES
from workloads import Workload

from actors.engine.model.loading import inspect
from actors.engine.model.weights import folder_tensors
from actors.engine.schedule.schedule import ScheduleSpec

CATEGORIES = Path("../shared/data/banking77/categories.json")


@torch.inference_mode()
def test_a_pruned_model_is_the_base_without_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base: PreTrainedModel = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    monkeypatch.setattr("real_evidence.AutoTokenizer", _NoTokenizer)
    prune(tmp_path / "base", tmp_path / "out", [5, 0, 2])
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert pruned.config.num_hidden_layers == 3
    ids = torch.arange(3, 20)[None]
    hidden = base.model.embed_tokens(ids)
    rotary = base.model.rotary_emb(hidden, torch.arange(17)[None])
    for number in (0, 2, 5):
        hidden = base.model.layers[number](hidden, position_embeddings=rotary)
    torch.testing.assert_close(pruned(ids).logits, base.lm_head(base.model.norm(hidden)))


class _NoTokenizer:
    @classmethod
    def from_pretrained(cls, *args: object, **keys: object) -> _NoTokenizer:
        return cls()

    def save_pretrained(self, folder: Path) -> None:
        pass


@pytest.mark.parametrize("speedup", [1.0, 2.0])
def test_the_least_time_is_that_of_sums_by_hand(speedup: float) -> None:
    """FLOPs where memory is fast, and bytes where arithmetic is; rows that have ended cost nothing."""
    config, count, prompt, new = tiny_model("llama").config, 3, 7, 9
    schedule, shape = ScheduleSpec(speedup=speedup, horizon=6).build(LAYERS), Shape.of(config)
    size, heads = config.head_dim, config.num_key_value_heads
    width, cached = config.num_attention_heads * size, 2 * heads * size
    layer = config.hidden_size * 2 * (width + heads * size) + 3 * config.hidden_size * config.intermediate_size
    assert shape == Shape(layer, config.vocab_size * config.hidden_size, width, cached)
    depths = [schedule.depth(position) for position in range(new - 1)]
    keys = sum(depth * (prompt + position + 1) for position, depth in enumerate(depths))

    def found(ceilings: Ceilings, *ends: int) -> Least:
        return least([(prompt, end) for end in ends], schedule, shape, ceilings, 4, 8)

    flops = found(Ceilings(1.0, 1e30), *[new] * count)
    pairs = math.comb(prompt + 1, 2)
    assert flops.prefill == pytest.approx(2 * count * (LAYERS * (prompt * layer + 2 * pairs * width) + shape.head))
    assert flops.head == pytest.approx(2 * count * shape.head * (new - 1))
    assert flops.decode == pytest.approx(2 * count * (layer * sum(depths) + 2 * keys * width) + flops.head)
    moved = found(Ceilings(1e30, 1.0), *[new] * count)
    assert moved.prefill == pytest.approx(4 * (LAYERS * (layer + count * prompt * cached) + shape.head))
    assert moved.decode == pytest.approx(4 * (layer * sum(depths) + count * keys * cached + shape.head * (new - 1)))
    assert found(Ceilings(1.0, 1e30), new, 1).decode == pytest.approx(flops.decode / count)


def test_the_ideal_is_the_measured_time_without_the_skipped_layers() -> None:
    full, half = Least(prefill=2.0, decode=5.0, head=1.0), Least(prefill=2.0, decode=3.0, head=1.0)
    assert taken_off(10.0, 21.0, full, full) == (31.0, 21.0)
    assert taken_off(10.0, 21.0, full, half) == (21.0, 11.0)  # 20 s of layers at 1x, half of them left, and the head
    one_token = Least(prefill=1.0, decode=0.0, head=0.0)
    assert taken_off(10.0, 0.0, Least(2.0, 0.0, 0.0), one_token) == (5.0, 0.0)


def test_a_shared_beginning_is_computed_for_no_row() -> None:
    shape, ceilings = Shape(layer=1000, head=10, width=4, cached=2), Ceilings(flops=1.0, bandwidth=1e12)
    schedule = ScheduleSpec().build(3)
    whole = least([(10, 1)] * 4, schedule, shape, ceilings, 4, 2)
    shared = least([(10, 1)] * 4, schedule, shape, ceilings, 4, 2, shared=6)
    assert shared.prefill < 0.5 * whole.prefill
    assert shared.decode == whole.decode == 0


def test_values_are_counted_word_for_word() -> None:
    prompt = "name[The Eagle], priceRange[£20-25], familyFriendly[yes], near[Café Rouge]"
    assert values_of(prompt) == ["The Eagle", "£20-25", "Café Rouge"]
    assert values_stated([prompt, prompt], ["the eagle near Café Rouge", ""]) == (2, 6)


def test_the_most_similar_text_comes_first() -> None:
    similar = Similar(["my card was stolen", "when does my card arrive", "exchange rate for euros"])
    assert similar.nearest(["the card has not arrived, when will it arrive", "euros rate"], 2)[0][0] == 1
    assert similar.nearest(["the card was stolen"], 1) == [[0]]


@pytest.mark.skipif(not CATEGORIES.is_file(), reason=f"{CATEGORIES} is not there: tests/benchmarks/fetch_data.py")
def test_every_intent_has_a_topic() -> None:
    topics = [topic_of(intent) for intent in json.loads(CATEGORIES.read_text())]
    assert set(topics) == set(TOPICS)
    assert min(topics.count(topic) for topic in TOPICS) >= 4


PEER = """
import time
from peer_process import serve

def start(checkpoint, threads, max_rows):
    assert checkpoint.endswith("good"), "no such model"
    def answer(prompts, new):
        if new[0] == 13:
            raise RuntimeError("thirteen")
        if new[0] == 60:
            time.sleep(60)
        return sum(new) - (new[0] == 7)
    return answer, "1.2"

serve(start)
"""


def workload(new: int) -> Workload:
    return Workload([[4, 5], [6]], [new, 3])


def peer_of(folder: Path, checkpoint: str) -> Peer:
    script = folder / "peer.py"
    script.write_text(PEER)
    return Peer(sys.executable, str(script), folder / checkpoint, 1, 2, PYTHONPATH=str(HERE))


def test_a_peer_answers_again_after_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = peer_of(tmp_path, "good")
    try:
        assert peer.version == "1.2"
        first = peer.answer(workload(5))
        assert first.tokens == 8 and first.seconds > 0
        assert 2**20 < first.peak_bytes < 2**28
        with pytest.raises(PeerEnded, match="thirteen"):
            peer.answer(workload(13))
        with pytest.raises(PeerEnded, match="9 tokens, 10 were asked for"):
            peer.answer(workload(7))
        monkeypatch.setattr(contestants, "PEER_LIMIT", 1)
        with pytest.raises(PeerEnded, match="no answer in 1 s"):
            peer.answer(workload(60))
        monkeypatch.undo()
        assert peer.answer(workload(5)).tokens == 8
    finally:
        peer.close()


def test_a_peer_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerEnded, match="no such model"):
        peer_of(tmp_path, "bad")


def test_the_model_of_time_repeats_what_was_measured_on_a_gpu() -> None:
    """The figures of README for plain vLLM and for the eager add-on at 2x, which it was fitted to."""
    config = SHAPES["llama-3-8b"]().to_dict()
    given = argparse.Namespace(prompt_tokens=128, new_tokens=128, shared=0, max_rows=None)
    for rows, tokens_per_second, eager in ((32, 5176, 0.56), (256, 15_504, 0.76), (1024, 15_969, 1.06)):
        plain, _ = predict.run(config, None, given, rows)
        skipping, _ = predict.run(config, {"speedup": 2}, given, rows)
        assert rows * 128 / plain * 1000 == pytest.approx(tokens_per_second, rel=0.05)
        assert plain / skipping == pytest.approx(eager, rel=0.12)
    labels = argparse.Namespace(prompt_tokens=512, new_tokens=1, shared=0, max_rows=1024)
    seconds = [predict.run(config, LINES[line], labels, 4000)[0] for line in ("plain", "uniform 2x", "uniform 3x")]
    assert seconds[0] / seconds[1] == pytest.approx(2, abs=0.05)
    assert seconds[0] / seconds[2] == pytest.approx(32 / 11, abs=0.05)


def test_a_checkpoint_without_weights_takes_no_room(tmp_path: Path) -> None:
    write_unfilled("tiny", tmp_path)
    checkpoint = inspect(tmp_path, by_vllm=True)
    whole = AutoModelForCausalLM.from_config(checkpoint.config)
    assert folder_tensors(tmp_path).keys() == dict(whole.named_parameters()).keys()
    weights = (tmp_path / "model.safetensors").stat()
    assert weights.st_blocks * 512 < 2**17 < weights.st_size


def test_the_rows_of_all_systems_have_mixed_lengths(tmp_path: Path) -> None:
    write_rows(tmp_path, 40)
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    lengths = {len(row["prompt"].split()) for row in rows}
    limits = {row["sampling"]["max_new_tokens"] for row in rows}
    assert 16 <= min(lengths) < 40 < 160 < max(lengths) <= 256
    assert 8 <= min(limits) < 20 < 80 < max(limits) <= 128


def test_the_picture_shows_the_figures_of_the_tables() -> None:
    assert (pictures.PICTURES / "speed.svg").read_text() == pictures.picture(), "make pictures"


TURNS = [{"speaker": "A", "content": text} for text in ("one", " ", "two words", "three ", "four", "five")]
MEETING = {
    "specific_query_list": [
        {"query": "Why? ", "answer": " So.", "relevant_text_span": [["2", "3"], ["0", "1"]]},
        {"query": "When?", "answer": "Now.", "relevant_text_span": [["4", "4"]]},
    ],
    "general_query_list": [{"query": "All?", "answer": "Yes."}],
    "meeting_transcripts": TURNS,
}
UPSTREAM = {
    "e2e": {
        "trainset.csv": 'mr,ref\r\n"name[A], food[B]",A has B.\r\n"name[A], food[B]","B, at A."\r\n',
        "devset.csv": "mr,ref\nname[C],It is C.\nname[D],D\nname[C],C\n",
        "testset_w_refs.csv": "mr,ref\nname[E],E\nname[F],F\nname[G],G\n",
    },
    "banking77": {
        "banking_data/train.csv": 'text,category\n"Where is\n""it""?",lost\nno,top_up\n',
        "banking_data/test.csv": "text,category\nhm,top_up\nIs it?,lost\n",
        "banking_data/categories.json": '["lost", "top_up"]',
    },
    "qmsum": {
        "data/ALL/train/m2.json": json.dumps({**MEETING, "specific_query_list": []}),
        "data/ALL/val/m1.json": json.dumps(MEETING),
        "data/ALL/test/m3.json": json.dumps(MEETING),
    },
}


@pytest.fixture
def archives(tmp_path: Path) -> Iterator[str]:
    """The address of a server that stands for GitHub, with made-up archives."""
    for name, files in UPSTREAM.items():
        repository, commit, _ = fetch_data.SETS[name]
        folder = tmp_path / "public" / repository / "archive"
        folder.mkdir(parents=True)
        with tarfile.open(folder / f"{commit}.tar.gz", "w:gz") as archive:
            for path, text in files.items():
                member = tarfile.TarInfo(f"top-{commit}/{path}")
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "public"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_data_sets_are_fetched_as_the_benchmarks_read_them(
    archives: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = {"e2e-test": 0b101, "banking77-train": 0b01, "banking77-test": 0b10}
    masks = {split: base64.b64encode(bytes([value])).decode() for split, value in bits.items()}
    monkeypatch.setattr(fetch_data, "MEASURED", {**masks, "qmsum-test": {"m3": ["1", "g0"]}})
    monkeypatch.setattr(fetch_data, "GENERAL_WORDS", 6)
    data = tmp_path / "data"
    (data / "qmsum").mkdir(parents=True)
    (data / "qmsum" / "train.parquet").write_bytes(b"own")
    monkeypatch.setattr(sys, "argv", ["fetch_data.py", "--data", str(data), "--source", archives])
    fetch_data.main()

    def rows(name: str) -> list[tuple[object, ...]]:
        return [tuple(row.values()) for row in pq.read_table(data / f"{name}.parquet").to_pylist()]

    assert (data / "qmsum" / "train.parquet").read_bytes() == b"own"
    assert rows("e2e/train") == [
        ("e2e-train-00000", "name[A], food[B]", "A has B."),
        ("e2e-train-00001", "name[A], food[B]", "B, at A."),
    ]
    assert rows("e2e/dev") == [("e2e-dev-0000", "name[C]", ["It is C.", "C"]), ("e2e-dev-0001", "name[D]", ["D"])]
    assert rows("e2e/test") == [("e2e-test-0000", "name[E]", ["E"]), ("e2e-test-0002", "name[G]", ["G"])]
    assert rows("banking77/train") == [("banking77-train-00000", 'Where is\n"it"?', "lost", "lost")]
    assert rows("banking77/test") == [("banking77-test-0001", "Is it?", ["lost"], "lost")]
    assert json.loads((data / "banking77" / "categories.json").read_text()) == ["lost", "top_up"]
    start = "All?\nA: one\nA: two words"  # 5 words: one less than asked; the next turn adds two
    assert rows("qmsum/dev") == [
        ("qmsum-dev-m1-0", "Why?\nA: one\nA: two words\nA: three", ["So."]),
        ("qmsum-dev-m1-1", "When?\nA: four", ["Now."]),
        ("qmsum-dev-m1-g0", start, ["Yes."]),
    ]
    assert [row[:2] for row in rows("qmsum/test")] == [
        ("qmsum-test-m3-1", "When?\nA: four"),
        ("qmsum-test-m3-g0", start),
    ]


@pytest.mark.parametrize("split", ["e2e/test", "banking77/train", "banking77/test", "qmsum/test"])
def test_the_rows_that_were_measured_are_named(split: str) -> None:
    path = Path("../shared/data") / f"{split}.parquet"
    if not path.is_file():
        pytest.skip(f"{path} is not there: tests/benchmarks/fetch_data.py")
    ids = pq.read_table(path, columns=["id"])["id"].to_pylist()
    name = split.replace("/", "-")
    if name == "qmsum-test":
        named = [f"{name}-{meeting}-{one}" for meeting, ones in fetch_data.MEASURED[name].items() for one in ones]
    else:
        digits = len(ids[0].rpartition("-")[2])
        every = [{"id": f"{name}-{number:0{digits}d}"} for number in range(int(ids[-1].rpartition("-")[2]) + 1)]
        named = [row["id"] for row in fetch_data.measured(name, every)]
    assert named == ids
